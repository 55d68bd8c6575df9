/* Draws from a table of a distribution function in 256 bits, as in discrete.py: 32 of them decide, but where they do
   not, and then 224 more. */

#include <stdint.h>

#define REST 7 /* words that follow the first: discrete.py, REST */

/* Is the number of the words `more` at or above that of `rest`? */
static int reaches(const uint32_t *more, const uint32_t *rest) {
    for (int i = 0; i < REST; i++)
        if (more[i] != rest[i]) return more[i] > rest[i];
    return 1;
}

/* into[i] += factor (first + how many entries are at or below the number that begins with words[i]).
   `guide[w >> 20]` is where the search for w begins. Returns how many of the `spare` words were used, -1 if too few. */
int64_t add_draws(
    int64_t *into, int64_t count, int64_t factor, int64_t first, const uint32_t *words, const uint32_t *high,
    const uint32_t *rest, int64_t entries, const uint32_t *guide, const uint32_t *more, int64_t spare
) {
    int64_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = words[i];
        int64_t place = guide[word >> 20];
        while (place < entries && high[place] < word) place++;
        if (place < entries && high[place] == word) {
            if (used + REST > spare) return -1;
            while (place < entries && high[place] == word && reaches(more + used, rest + REST * place)) place++;
            used += REST;
        }
        into[i] += factor * (first + place);
    }
    return used;
}
