"""The same algorithms over a network: a coordinator and sites that keep their data, on Flower's transport.

payload, terms          what is said between them, as plain records
gate, consent          the two firewalls: what the coordinator checks, what a site checks
coordinator, site      the two halves of a round (training/round.py), apart
roster, mail           who is there, and messages to them over any Flower grid
superlink, node        Flower's SuperLink inside `shoal serve`, its client inside `shoal join`
keys, apps             certificates and node keys; the same as a plain Flower app
secure_*               secure aggregation: the coordinator learns only a sum
    shamir, masks, keys, wire    secrets in shares, masks that cancel, keys for a round, how they are written
    plan                         what is public of a round: threshold, grid, shares of noise, modulus
    site, desk                   a site's part of the protocol, and its messages
    tally, coordinator           the coordinator's part, and its round
"""
