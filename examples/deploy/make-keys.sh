#!/bin/sh
# Keys for a trial on one machine: sh make-keys.sh HOST... writes keys/ for the coordinator and NAME/ for each site.
# In production each site makes its own key and sends only NAME.pub.
set -eu
[ -e keys/ca.pem ] && exit 0
shoal keys coordinator "$@" --folder keys
for site in north south east; do
    shoal keys site "$site" --folder "$site"
    cp "$site/$site.pub" keys/sites/
    cp keys/ca.pem "$site/"
done
