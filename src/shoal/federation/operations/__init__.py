"""What operators need of a running coordinator.

monitor      collects events and the federation's status; passes commands to the coordinator
status       the federation at one moment, as metrics, page and `shoal sites list` show it
logs         log lines with levels, as text or JSON
audit_log    joins, refusals, strikes and authentication failures, in the run's folder
metrics      the status as Prometheus text
live_page    the status as a page that refreshes itself
http_server  /health, /metrics and the page, on an address of their own
control      commands of `shoal sites` over a Unix socket in the run's folder
"""
