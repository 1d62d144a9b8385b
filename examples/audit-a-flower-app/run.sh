#!/bin/sh
# Run the app on six simulated nodes with Flower's own tools, listening on loopback only.
set -eu
cd "$(dirname "$0")"
bin=${FLWR_BIN:-../../.venv/bin}
FLWR_HOME=$(mktemp -d)
export FLWR_HOME FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0
printf '[superlink]\ndefault = "sim"\n[superlink.sim]\naddress = "127.0.0.1:18077"\ninsecure = true\n' >"$FLWR_HOME/config.toml"
PATH=$(cd "$bin" && pwd):$PATH
flower-superlink --insecure --simulation --host 127.0.0.1 --port 18077 --disable-runtime-dependency-installation &
superlink=$!
trap 'kill $superlink; rm -rf "$FLWR_HOME"' EXIT
until python -c 'import socket; socket.create_connection(("127.0.0.1", 18077), timeout=1)' 2>/dev/null; do
  kill -0 $superlink 2>/dev/null || { echo "run.sh: the SuperLink ended; see above" >&2; exit 1; }
  sleep 1
done
flwr run . sim --stream --run-config "recording=\"$PWD/recording\"" \
  --federation-config "num-supernodes=6 client-resources-num-cpus=1"
if ! flwr ls sim --format json | grep -q '"status": "finished:completed"'; then
  echo "run.sh: the run did not complete; see the log above" >&2 # flwr run itself exits 0 then
  exit 1
fi
run=$(ls -td recording/run-* | head -1)
echo "recorded in $run; next: fedsim attack $run attack.toml"
