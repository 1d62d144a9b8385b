#!/bin/sh
# Make what the `tls` profile needs, for tests and for hosts of your own: a CA, a certificate of the
# SuperLink, and one key pair a SuperNode. Usage: make-certificates.sh FOLDER SUPERNODES [HOST...]
# where HOST is any other name or address under which SuperNodes reach the SuperLink.
set -eu
folder=$1 supernodes=$2
shift 2
if [ -e "$folder" ]; then
  echo "make-certificates.sh: $folder is there already; move it away first" >&2
  exit 1
fi
umask 077
mkdir -p "$folder/ca" "$folder/superlink"
names="DNS:superlink-tls,DNS:localhost,IP:127.0.0.1"
for host in "$@"; do
  case $host in
    *[!0-9.]*) names="$names,DNS:$host" ;;
    *) names="$names,IP:$host" ;;
  esac
done
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj "/CN=fedsim CA" \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
  -keyout "$folder/ca/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey rsa:3072 -nodes -subj "/CN=superlink-tls" \
  -keyout "$folder/superlink/superlink.key" -out "$folder/ca/superlink.csr" 2>/dev/null
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" >"$folder/ca/superlink.ext"
openssl x509 -req -days 365 -in "$folder/ca/superlink.csr" -extfile "$folder/ca/superlink.ext" \
  -CA "$folder/ca.crt" -CAkey "$folder/ca/ca.key" -CAserial "$folder/ca/ca.srl" -CAcreateserial \
  -out "$folder/superlink/superlink.crt" 2>/dev/null
mkdir "$folder/public"
for k in $(seq "$supernodes"); do
  mkdir "$folder/supernode-$k"
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "supernode-$k" -f "$folder/supernode-$k/key"
  mv "$folder/supernode-$k/key.pub" "$folder/public/supernode-$k.pub"
done
chmod -R a+rX "$folder/public" "$folder/ca.crt"
chmod a+x "$folder"
echo "made $folder; ca/ca.key signs certificates: keep it off the hosts"
