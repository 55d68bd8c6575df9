"""The same algorithms over a network: a coordinator and sites that keep their data, on Flower's transport.

messages, terms        what they exchange, as plain values and vectors
validation             the coordinator's checks on every answer
consent, policy        a site's checks on the terms: its own ledger, and bounds on their values
policy_file            both, as the owner writes them in site-policy.toml
policy_check           what a policy would refuse, before anybody joins
coordinator, site      the two halves of a round (training/round.py)
roster, site_records   the sites of a run; a site's own data
serve                  the coordinator's entry point
keys, key_watch        certificates and site keys; a running coordinator follows their folder
flower/                messages over any Flower grid; Flower's SuperLink inside `shoal serve`, its client inside
                       `shoal join`; the same as a plain Flower app
operations/            what operators need: logs, metrics, a live page, an audit log, commands
secagg/                secure aggregation: the coordinator learns only a sum
"""
