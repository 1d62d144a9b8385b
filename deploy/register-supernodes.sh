#!/bin/sh
# Tell a SuperLink whose SuperNodes it may trust. Usage: register-supernodes.sh CONNECTION PUBLIC_KEY...
# A SuperLink that keeps its state in memory has to be told again after each start; telling it twice does no harm.
set -eu
connection=$1
shift
for key in "$@"; do
  if said=$(flwr supernode register "$key" "$connection" 2>&1); then
    echo "registered $key"
  else
    case $said in
      *"already in use"*) echo "registered before: $key" ;;
      *) printf 'register-supernodes.sh: %s is refused\n%s\n' "$key" "$said" >&2 && exit 1 ;;
    esac
  fi
done
