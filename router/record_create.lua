-- Creates a request record unless its id is known. Its first owner_epoch is this store's clock, so that it grows when an
-- id is used again after its record went; in microseconds, so that no two lives of an id share one. Fits a double.
-- KEYS[1] record; ARGV[1] seconds it may stay open; ARGV[2] names this creation, so that one whose answer was lost can be
-- sent again; ARGV[3..] field, value, ...
-- Returns {1, owner_epoch} when created, else {0, digest, state} of the record that exists.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local found = redis.call('HMGET', KEYS[1], 'request_digest', 'state', 'creation', 'owner_epoch')
  if found[3] == ARGV[2] then
    return {1, found[4]}
  end
  return {0, found[1] or '', found[2] or ''}
end
local now = redis.call('TIME')
local epoch = string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]))
redis.call('HSET', KEYS[1], 'owner_epoch', epoch, 'creation', ARGV[2], unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[1], tonumber(ARGV[1]))
return {1, epoch}
