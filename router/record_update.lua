-- Compare-and-set on (attempt, phase, owner_epoch): never backwards, never past the end, never by another owner.
-- KEYS[1] record; ARGV[1] attempt; ARGV[2] phase; ARGV[3] owner_epoch; ARGV[4] seconds to keep, 0: as before;
-- ARGV[5..] field, value, ...
-- An ended record keeps neither prompt nor sampling parameters: nobody needs them, and they are most of its bytes.
-- Returns 1 applied, 0 refused, -1 no such record.
local now = redis.call('HMGET', KEYS[1], 'attempt', 'phase', 'owner_epoch')
if not now[1] then
  return -1
end
local attempt, phase, epoch = tonumber(now[1]), tonumber(now[2]), tonumber(now[3])
local to_attempt, to_phase = tonumber(ARGV[1]), tonumber(ARGV[2])
if epoch ~= tonumber(ARGV[3]) or phase == 3 then
  return 0
end
if to_attempt < attempt or (to_attempt == attempt and to_phase < phase) then
  return 0
end
redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'phase', ARGV[2], unpack(ARGV, 5))
if to_phase == 3 then
  redis.call('HDEL', KEYS[1], 'prompt', 'sampling')
end
if tonumber(ARGV[4]) > 0 then
  redis.call('EXPIRE', KEYS[1], tonumber(ARGV[4]))
end
return 1
