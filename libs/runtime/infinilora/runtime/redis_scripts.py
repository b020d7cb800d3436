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

# A late amount is decayed to the stamp, an early score to now: the sum is the same in either order.
ADD_HEAT = """
local half_life, amount, now = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local held = redis.call('HGET', KEYS[1], ARGV[1])
local score, stamp = 0, now
if held then
  local s, t = string.match(held, '^(%S+) (%S+)$')
  score, stamp = tonumber(s), tonumber(t)
end
if now >= stamp then
  score, stamp = score * 2 ^ ((stamp - now) / half_life) + amount, now
else
  score = score + amount * 2 ^ ((now - stamp) / half_life)
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.17g %.17g', score, stamp))
"""

READ_HEAT = """
local half_life, now, cold = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local flat, reply = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #flat, 2 do
  local s, t = string.match(flat[i + 1], '^(%S+) (%S+)$')
  local score = tonumber(s) * 2 ^ (math.min(0, tonumber(t) - now) / half_life)
  if score < cold then redis.call('HDEL', KEYS[1], flat[i])
  else
    table.insert(reply, flat[i])
    table.insert(reply, string.format('%.17g', score))
  end
end
return reply
"""

ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
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
