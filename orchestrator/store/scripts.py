"""Lua scripts that a Redis server runs, each in one step.

Every script touches one key and takes constant time, except the scripts of workers, which take as many steps
as there are workers, and the script of quotas, which takes as many as there are orchestrators.

An epoch that is not 16 hexadecimal digits, or is above `ceiling` (the latest epoch that a clock can have
made), is invalid and replaced. An entry of another version is left as it is, and the script answers FOREIGN.
"""

FOREIGN = -2

_PRELUDE = """
local function epoch_or(text, ceiling)
  if text and #text == 16 and string.find(text, '^%x+$') and text <= ceiling then return text end
  return ''
end
local function foreign(key, version, ours)
  return version ~= ours and (version or redis.call('EXISTS', key) == 1)
end
"""

PUT = (
    _PRELUDE
    + """
local ours, epoch, verifier, choices, cancelled, lifts, lease, ceiling, request = unpack(ARGV)
local known = redis.call('HMGET', KEYS[1], 'version', 'epoch', 'cancelled', 'request')
if foreign(KEYS[1], known[1], ours) then return -2 end
local before = epoch_or(known[2], ceiling)
if before > epoch then return 0 end
local unknown = string.rep('0', 16)
local same = known[4] == request or request == unknown or (known[4] or unknown) == unknown
if before ~= '' and known[3] == '1' and same and before >= lifts then cancelled = '1' end
redis.call('HSET', KEYS[1], 'version', ours, 'epoch', epoch, 'verifier', verifier, 'choices', choices,
  'cancelled', cancelled, 'request', request)
redis.call('PEXPIRE', KEYS[1], lease)
return 1
"""
)
"""KEYS: record. ARGV: version, epoch, verifier, choices, cancelled, lifts, lease in ms, ceiling, request.
Answers 1: kept."""

CANCEL = """
local version = redis.call('HGET', KEYS[1], 'version')
local before = redis.call('HGETALL', KEYS[1])
if version == ARGV[1] then
  redis.call('HSET', KEYS[1], 'cancelled', '1')
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return before
"""
"""KEYS: record. ARGV: version, lease in ms. Answers the record as it was before, as a list."""

FORGET = """
local known = redis.call('HMGET', KEYS[1], 'version', 'epoch', 'cancelled')
if known[1] == ARGV[1] and known[2] == ARGV[2] and known[3] ~= '1' then redis.call('DEL', KEYS[1]) end
return 1
"""
"""KEYS: record. ARGV: version, epoch."""

APPEND = (
    _PRELUDE
    + """
local ours, epoch, start, bytes, lease, ceiling = unpack(ARGV)
start = tonumber(start)
local head = redis.call('GETRANGE', KEYS[1], 0, 16)
if #head > 0 and string.sub(head, 1, 1) ~= ours then return -2 end
local size = redis.call('STRLEN', KEYS[1]) - 17
local before = epoch_or(string.sub(head, 2), ceiling)
if before > epoch then return -1 end
if before < epoch or size % 4 ~= 0 then
  if start > 0 then return 0 end
  redis.call('SET', KEYS[1], ours .. epoch .. bytes, 'PX', lease)
  return #bytes / 4
end
local length = size / 4
if start <= length then
  local tail = string.sub(bytes, (length - start) * 4 + 1)
  if #tail > 0 then redis.call('APPEND', KEYS[1], tail) end
  redis.call('PEXPIRE', KEYS[1], lease)
  length = length + #tail / 4
end
return length
"""
)
"""KEYS: tokens. ARGV: version, epoch, start, ids as bytes, lease in ms, ceiling. Answers a length, or -1."""

PUT_HANDLE = (
    _PRELUDE
    + """
local ours, epoch, verifier, length, hash, lease, ceiling = unpack(ARGV)
local known = redis.call('HMGET', KEYS[1], 'version', 'epoch')
if foreign(KEYS[1], known[1], ours) then return -2 end
if epoch_or(known[2], ceiling) > epoch then return 0 end
redis.call('HSET', KEYS[1], 'version', ours, 'epoch', epoch, 'verifier', verifier, 'length', length,
  'hash', hash)
redis.call('PEXPIRE', KEYS[1], lease)
return 1
"""
)
"""KEYS: handle. ARGV: version, epoch, verifier, length, hash, lease in ms, ceiling."""

REPORT = """
local now = redis.call('TIME')
local ends = string.format('%016d', now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ends .. ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
"""KEYS: workers. ARGV: lease in ms, then names and reports. Reports end by the server's own clock."""

WORKERS = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local all, alive = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local ends = tonumber(string.sub(all[i + 1], 1, 16))
  if not ends or ends > now + 60000 then
    alive[#alive + 1] = '?'
  elseif ends > now then
    alive[#alive + 1] = string.sub(all[i + 1], 17)
  elseif string.sub(all[i + 1], 17, 17) == ARGV[1] then
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return alive
"""
"""KEYS: workers. ARGV: version. Answers the reports that have not ended, and a ? for each that is not a
report."""

USE_QUOTA = (
    _PRELUDE
    + """
local ours, reporter, lease = ARGV[1], 's:' .. ARGV[2], tonumber(ARGV[3])
local streams, per_minute, tokens_per_minute = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local running, spent, beginning = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local version = redis.call('HGET', KEYS[1], 'version')
if foreign(KEYS[1], version, ours) then return -2 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, elsewhere = {}, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local name, value = all[i], all[i + 1]
  known[name] = value
  if string.sub(name, 1, 2) == 's:' and name ~= reporter then
    local ends, count = string.match(value, '^(%d+) (%d+)$')
    ends = tonumber(ends)
    if ends and ends > now and ends <= now + 2 * lease then
      elsewhere = elsewhere + tonumber(count)
    else
      redis.call('HDEL', KEYS[1], name)
    end
  end
end
local passed = math.max(0, now - (tonumber(known['at']) or now))
local function level(name, most, amount)
  local held = tonumber(known[name])
  if not held or held ~= held then held = most end
  return math.min(most, held + passed * most / 60000) - amount
end
local requests, tokens = level('requests', per_minute, 0), level('tokens', tokens_per_minute, spent)
local refused = ''
if beginning > 0 then
  if streams >= 0 and elsewhere + running + beginning > streams then refused = 'streams'
  elseif per_minute >= 0 and requests < math.min(beginning, per_minute) - 0.000001 then refused = 'requests'
  elseif tokens_per_minute >= 0 and tokens < math.min(1, tokens_per_minute) - 0.000001 then refused = 'tokens'
  else running, requests = running + beginning, requests - beginning end
end
local function text(number) return string.format('%.6f', number) end
redis.call('HSET', KEYS[1], 'version', ours, 'at', now, 'requests', text(requests), 'tokens', text(tokens))
if running > 0 then
  redis.call('HSET', KEYS[1], reporter, string.format('%d %d', now + lease, running))
else
  redis.call('HDEL', KEYS[1], reporter)
end
local fills = 0
if per_minute > 0 then fills = (per_minute - requests) / per_minute end
if tokens_per_minute > 0 then fills = math.max(fills, (tokens_per_minute - tokens) / tokens_per_minute) end
redis.call('PEXPIRE', KEYS[1], lease + math.ceil(60000 * fills))
return {refused, elsewhere, text(requests), text(tokens)}
"""
)
"""KEYS: quota. ARGV: version, reporter, lease in ms, streams, requests and tokens per minute (-1: no bound),
running, tokens spent, requests that begin. Answers the bound that refuses them (or nothing), the requests
that run elsewhere, the requests and the tokens that are left."""
