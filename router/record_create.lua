-- Creates a request record unless its id is known.
-- KEYS[1] record; ARGV[1] seconds it may stay open; ARGV[2..] field, value, ...
-- Returns {1} when created, else {0, digest, state} of the record that exists.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local found = redis.call('HMGET', KEYS[1], 'request_digest', 'state')
  return {0, found[1] or '', found[2] or ''}
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('EXPIRE', KEYS[1], tonumber(ARGV[1]))
return {1}
