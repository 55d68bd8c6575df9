"""The audit: what an adversary really learns, measured on the code that runs, beside what is claimed.

A claim is an upper bound on epsilon; an audit finds a lower bound by attack. Where the lower one passes the upper
one, either the mathematics or the code is wrong.
"""
