#!/bin/sh
# Start the run of federation.toml in this folder, resume it after a crash or a reboot, or say that it has ended:
# sh coordinator.sh FEDERATION.toml OPTIONS... (those of `shoal serve`).
set -eu
config=$1
shift
run=$(ls -d runs/*/ 2>/dev/null | tail -n 1)
if [ -z "$run" ]; then
    exec shoal serve "$config" "$@"
elif [ -e "${run}result.json" ]; then
    echo "the run in $run has ended; move runs/ away to start another"
else
    exec shoal serve --resume "$run" "$@"
fi
