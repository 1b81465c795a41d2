-- Erases a record that has ended.
-- KEYS[1] record; KEYS[2] output checkpoints.
-- Returns 1 erased, 0 still open, -1 no such record.
local phase = redis.call('HGET', KEYS[1], 'phase')
if not phase then
  return -1
end
if tonumber(phase) ~= 3 then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
