"""The store's scripts, which Redis runs whole or not at all. Knows no key; `store.py` says what each one promises."""

# KEYS: one for each change, then two for each effect (its journal, its counter). ARGV: the number of changes; for each
# its field (empty: the whole key), its expected value, what to do and its new value; for each effect what to do and its
# member. PUT and DROP are SET and DEL that expect nothing.
SWAP = """
local n = tonumber(ARGV[1])
for i = 1, n do
  local field, act, held = ARGV[4 * i - 2], ARGV[4 * i], false
  if act ~= 'PUT' and act ~= 'DROP' then
    if field == '' then held = redis.call('GET', KEYS[i]) else held = redis.call('HGET', KEYS[i], field) end
    if (held or '') ~= ARGV[4 * i - 1] then return {0} end
  end
end
for i = 1, n do
  local field, act, value = ARGV[4 * i - 2], ARGV[4 * i], ARGV[4 * i + 1]
  local sets, deletes = act == 'SET' or act == 'PUT', act == 'DEL' or act == 'DROP'
  if sets and field == '' then redis.call('SET', KEYS[i], value)
  elseif sets then redis.call('HSET', KEYS[i], field, value)
  elseif deletes and field == '' then redis.call('DEL', KEYS[i])
  elseif deletes then redis.call('HDEL', KEYS[i], field) end
end
local reply = {1}
for i = 1, (#KEYS - n) / 2 do
  local key, counter = KEYS[n + 2 * i - 1], KEYS[n + 2 * i]
  local act, member = ARGV[4 * n + 2 * i], ARGV[4 * n + 2 * i + 1]
  if act == 'STAMP' then
    local number = redis.call('INCR', counter)
    redis.call('ZADD', key, number, member)
    table.insert(reply, number)
  else redis.call('ZREM', key, member) end
end
return reply
"""

# KEYS: the journal, the marks, where the highest number taken out is noted. ARGV: up to which number, how many at most.
TRIM = """
local marked = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for i = 1, #marked, 2 do
  redis.call('ZREM', KEYS[1], marked[i])
  redis.call('ZREM', KEYS[2], marked[i])
end
if #marked > 0 then redis.call('SET', KEYS[3], marked[#marked]) end
return #marked / 2
"""

# heat.py says what a score is. KEYS: a sorted set for each half-life. ARGV: the landmark, how long ago these requests
# came, how many are forgotten at most, the logarithms of what is cold and of what is not believed; the half-lives; then
# digests, each with the logarithm of its count. Returns when they came, on the server's clock.
ADD_HEAT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) - tonumber(ARGV[1]) + tonumber(time[2]) / 1e6
local came_at = now - tonumber(ARGV[2])
for k, key in ipairs(KEYS) do
  local half_life = tonumber(ARGV[5 + k])
  redis.call('ZREMRANGEBYSCORE', key, string.format('%.17g', tonumber(ARGV[5]) + now / half_life), '+inf')
  for i = 6 + #KEYS, #ARGV, 2 do
    local score, held = tonumber(ARGV[i + 1]) + came_at / half_life, redis.call('ZSCORE', key, ARGV[i])
    if held then
      held = tonumber(held)
      local high, low = math.max(held, score), math.min(held, score)
      score = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
    end
    redis.call('ZADD', key, string.format('%.17g', score), ARGV[i])
  end
  local cold = string.format('(%.17g', tonumber(ARGV[4]) + now / half_life)
  local gone = redis.call('ZRANGEBYSCORE', key, '-inf', cold, 'LIMIT', 0, ARGV[3])
  if #gone > 0 then redis.call('ZREM', key, unpack(gone)) end
end
return string.format('%.17g', came_at)
"""

# KEYS: the sorted set. ARGV: the landmark, how many. Returns the server's time, and the highest members with their
# scores in one text: to parse thousands of short replies takes a client ten times as long.
READ_HEAT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) - tonumber(ARGV[1]) + tonumber(time[2]) / 1e6
local ranked = redis.call('ZREVRANGE', KEYS[1], 0, ARGV[2] - 1, 'WITHSCORES')
return {string.format('%.17g', now), table.concat(ranked, ' ')}
"""

ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[3]) then redis.call('SET', KEYS[2], ARGV[3]) end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], epoch .. ' ' .. ARGV[1], 'PX', ARGV[2])
return epoch
"""

# A time to live of 0 gives the lease up.
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""
