-- Chooses among four scaling rules by their cost. A step's cost is the share of nonzero gradients
-- that lost bits; if the step overflows, its cost is 1, as if all gradients had lost bits. The rule
-- that decided the step bears this cost. One rule decides for `period` steps; then the rule with
-- the lowest mean cost minus an exploration bonus takes over. Meanwhile the other rules update
-- their own scales. Old costs are discounted, because training changes. Source: discounted UCB1
-- (Auer et al., 2002).

-- Each rule moves its own scale. `dynamic` reacts to overflows only; each other rule has a target
-- for the largest stored gradient.
local rules = {
  { name = "dynamic", next = function(s, r)
    s.good = r.overflow and 0 or (s.good or 0) + 1
    return r.overflow and s.scale / 2 or s.good % 500 == 0 and s.scale * 2 or s.scale
  end },
  { name = "bold", next = function(s, r)
    return r.overflow and s.scale / 2 or r.amax > 0 and 40000 / r.amax or s.scale
  end },
  { name = "careful", next = function(s, r)
    return r.overflow and s.scale / 2 or r.amax > 0 and 4096 / r.amax or s.scale
  end },
  { name = "timid", next = function(s, r)
    return r.overflow and s.scale / 4 or r.amax > 0 and 256 / r.amax or s.scale
  end },
}

return {
  name = "bandit",
  doc  = "Chooses among four scaling rules by the share of gradients each of them loses.",
  needs = { "amax", "underflow", "zeros" },

  options = {
    init_scale = 2^14,
    period     = 25,      -- steps that a rule stays in charge
    discount   = 0.95,    -- factor on earlier costs after each period
    curiosity  = 0.02,    -- weight of the exploration bonus
    min_scale  = 2^-10,
    max_scale  = 2^32,
  },

  init = function(options)
    check.expect(options, options.period >= 1 and options.discount > 0 and options.discount <= 1,
      "period >= 1 and discount in (0, 1]")
    local state = { scale = check.limits(options), arm = 1, left = options.period, arms = {} }
    for i = 1, #rules do state.arms[i] = { scale = options.init_scale, cost = 0, steps = 0 } end
    return state
  end,

  decide = function(state, record, options)
    local kept = record.count - record.zeros
    local arm, total = state.arms[state.arm], 0
    arm.cost = arm.cost + (record.overflow and 1 or kept > 0 and record.underflow / kept or 0)
    arm.steps = arm.steps + 1
    for i, a in ipairs(state.arms) do
      -- A rule with a smaller scale might not have overflowed, so its scale does not change.
      if not record.overflow or i == state.arm or a.scale >= record.scale then
        local wanted = rules[i].next(a, record)
        if i ~= 1 and not record.overflow then              -- 1/5 of the way, at most 1/5 octave
          wanted = a.scale * math.max(0.5, math.min(2, wanted / a.scale))^0.2
        end
        a.scale = math.max(options.min_scale, math.min(options.max_scale, wanted))
      end
      total = total + a.steps
    end
    state.left = state.left - 1
    local reason
    if state.left <= 0 then
      local best, least = 1, math.huge
      for i, a in ipairs(state.arms) do
        local worth = a.steps < 1 and -1
          or a.cost / a.steps - options.curiosity * math.sqrt(math.log(total + 1) / a.steps)
        if worth < least then best, least = i, worth end
        a.cost, a.steps = a.cost * options.discount, a.steps * options.discount
      end
      if best ~= state.arm then reason = "the rule " .. rules[best].name .. " takes over" end
      state.arm, state.left = best, options.period
    end
    state.scale = state.arms[state.arm].scale
    return { scale = state.scale, reason = reason }
  end,
}
