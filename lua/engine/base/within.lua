-- within(enter, leave, f, ...): runs f(...) under a global setting and returns its results. enter()
-- applies the setting; leave() ends it when f returns, raises an error or yields. When a coroutine
-- that yielded inside f is resumed, the setting applies again. Used for no_grad, scope, autocast,
-- profile, a module's forward, evaluating and other temporary settings. Called by tensor/, nn/ and
-- train/activations.lua.
local function finish(leave, good, ...)
  leave()
  if not good then error((...), 0) end
  return ...
end

return function(enter, leave, f, ...)
  local outer, is_main = coroutine.running()
  enter()
  if not outer or is_main then return finish(leave, pcall(f, ...)) end
  local inner = coroutine.create(function(...) return f(...) end)
  local resume
  local function turn(...)
    if coroutine.status(inner) == "dead" then return ... end
    return resume(coroutine.yield(...))
  end
  function resume(...)
    enter()
    return turn(finish(leave, coroutine.resume(inner, ...)))
  end
  return turn(finish(leave, coroutine.resume(inner, ...)))
end
