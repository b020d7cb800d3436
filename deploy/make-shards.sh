#!/bin/sh
# Have `docker compose up` start a LoRA server of several processes: sh deploy/make-shards.sh ExL, for example 2x2.
# Writes docker-compose.override.yml, which compose reads beside docker-compose.yml. 1x1 takes it away.
set -eu
cd "$(dirname "$0")/.."
file=docker-compose.override.yml
mark="# Written by deploy/make-shards.sh"

shape=${1:-}
experts=${shape%x*} layers=${shape#*x}
case "$experts-$layers" in
  [1-9]-[1-9] | [1-9][0-9]-[1-9] | [1-9]-[1-9][0-9] | [1-9][0-9]-[1-9][0-9]) ;;
  *) echo "found shape '$shape'; wanted ExL, such as 2x1: experts cut E ways, layers L ways" >&2; exit 2 ;;
esac
if [ "$shape" != "${experts}x${layers}" ] || [ "$experts" -gt 64 ] || [ "$layers" -gt 64 ]; then
  echo "found shape '$shape'; wanted ExL, each from 1 to 64" >&2; exit 2
fi
if [ -e "$file" ] && ! head -n 1 "$file" | grep -qF "$mark"; then
  echo "$file is not of this script: left as it is" >&2; exit 1
fi
rm -f "$file"
shards=$((experts * layers))
[ "$shards" -gt 1 ] || exit 0
{
  echo "$mark $shape"
  echo "services:"
  echo "  lora-server:"
  echo "    environment:"
  echo "      INFINILORA_SHAPE: $shape"
  shard=1
  while [ "$shard" -lt "$shards" ]; do
    echo "  lora-server-$shard:"
    echo "    extends: {file: docker-compose.yml, service: lora-server}"
    echo "    environment:"
    echo "      INFINILORA_SHAPE: $shape"
    echo "      INFINILORA_SHARD: \"$shard\""
    echo "      INFINILORA_HEAD: lora-server:7100"
    echo "      INFINILORA_ADVERTISE: lora-server-$shard:7100"
    shard=$((shard + 1))
  done
} > "$file.part"
mv "$file.part" "$file"
