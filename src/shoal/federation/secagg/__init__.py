"""Secure aggregation (Bonawitz et al. 2017): the coordinator learns only the sum of the updates.

shamir, masks, round_keys, encoding    secret sharing, masks that cancel, keys for a round, the wire format
commitments                            hashes of what is shared, by which a lie is found
graph, bundle_list                     who shares with whom beyond 100 sites (Bell et al. 2020), and its list of keys
round_plan                             a round's public numbers: threshold, grid, noise shares, modulus
party, client                          a site's part of the protocol, and its messages
aggregator, secure_cohort              the coordinator's part, and its round
"""
