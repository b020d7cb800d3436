#!/bin/sh
# Write .env from .env.example, with a fresh secret wherever the example leaves one open.
set -eu
cd "$(dirname "$0")/.."
[ ! -e .env ] || { echo ".env exists; it is left as it is"; exit 0; }
secret() { od -An -N 16 -t x1 /dev/urandom | tr -d ' \n'; }
umask 077
while IFS= read -r line; do
  case $line in
    OTLP_ENDPOINT=) printf '%s\n' "$line" ;;
    *=) printf '%ss%s\n' "$line" "$(secret)" ;;
    *) printf '%s\n' "$line" ;;
  esac
done < .env.example > .env.part
mv .env.part .env
echo "wrote .env"
