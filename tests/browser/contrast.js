// What on the page is harder to read than WCAG AA allows: [selector, ratio] of text against what it stands on.
(() => {
  const parse = (colour) => {
    const found = colour.match(/[\d.]+/g).map(Number);
    return colour.startsWith("color(") ? found.map((v, n) => (n < 3 ? 255 * v : v)) : found;
  };
  const linear = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const over = (top, below) => {
    const share = top.length < 4 ? 1 : top[3];
    return below.map((v, n) => top[n] * share + v * (1 - share));
  };
  const ground = (element) => {
    const stack = [];
    for (; element; element = element.parentElement) stack.push(parse(getComputedStyle(element).backgroundColor));
    return stack.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const ratio = (element) => {
    const a = luminance(parse(getComputedStyle(element).color)), b = luminance(ground(element));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const names = ["h1", ".tile p", ".big", ".warn", ".claims td", ".why", ".figure", "figcaption p", "summary", "th", "footer", ".chip", ".matrix td"];
  const all = names.flatMap((name) => [...document.querySelectorAll(name)].slice(0, 8).map((each) => [name, ratio(each)]));
  return all.filter(([, found]) => found < 4.5);
})();
