-- Applies FP8 recipes to a model: decides which linear layers run in FP8 and how (fp8_recipe.lua),
-- keeps their scales and meters from step to step, and runs the policies that choose scales.
--
--   local opt = engine.optim.adamw(model, { precision = "fp8_block" })   -- makes opt.fp8
--   print(opt.fp8)                       -- the recipe in force; the layers with their last meters
--
-- An explicit loop makes three calls in each step:
--   opt.fp8:begin(step)                  -- before the forward passes
--   engine.autocast("fp8_block", f)      -- runs the forward pass f in FP8
--   opt.fp8:observe(record)              -- before the step ends
--
-- Every FP8 layer is a site of the core (core/fp8/linear.c) with three roles: x, w, dy. FP8
-- policies see and scale them as policies/README.md says (section FP8). Called by scripts,
-- optim.lua, the trainer and run/.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fp8_recipe = require "engine.train.fp8_recipe"
local fp8_verdict = require "engine.policy.fp8_verdict"
local machine = require "engine.base.machine"
local mx = require "engine.tensor.mx"
local nearest = require "engine.base.nearest"
local policy_files = require "engine.policy.policy"
local precision = require "engine.train.precision"
local show = require "engine.base.show"
local weight_averages = require "engine.train.weight_averages"

local ffi, C, check, raise, raise_if = M_ffi.ffi, M_ffi.C, M_ffi.check, M_ffi.raise, M_ffi.raise_if
local roles = fp8_recipe.roles

local M = {}

-- Returns whether role r has one scale for the whole tensor, which a policy may choose.
local function one_scale(recipe, r)
  return recipe.role[r].block_rows == 0 and recipe.role[r].block_columns == 0
end

-- Refuses products for which a card has no tensor cores. A formula could compute them, but takes
-- many times as long as high precision. A product whose recipe names an accumulator is allowed,
-- because this asks for the formula. layer: the fields of a layer (fp8_recipe.layer). recipe: the
-- eng_fp8_recipe made from them.
local function refuse_formula(layer, recipe, where)
  local able = C.eng_device_fp8()   -- 0: no product is fast, 1: with one scale a tensor, 2: all
  if able == 2 or recipe.role[0].mx > 0 then return end   -- microscaling can multiply in bf16
  for i, name in ipairs(fp8_recipe.products) do
    local a, b = unpack(fp8_recipe.factors[name])
    local whole_tensors = one_scale(recipe, a) and one_scale(recipe, b)
    local asked = (layer[name].accumulator or "device") == "device"
      and recipe.product[i - 1].accumulator == fp8_recipe.accumulators.hopper
    if asked and not (able == 1 and whole_tensors) then
      local what, expected = "scales by row or block", "compute capability 9.0"
      if whole_tensors then
        what, expected = "a scale for each tensor", "compute capability 8.9 or later"
      end
      raise("%s: %s: this card (%s) has no tensor cores for FP8 with %s; expected %s; hint: " ..
        "precision=bf16%s, or ENGINE_FP8_FORMULA=1 for the same " ..
        "numbers from a slow formula", where, name, machine.device_text():match("^[^,]*, [^,]*"),
          what, expected, able == 1 and " or fp8_current" or "")
    end
  end
end

-- ------------------------------------------------------------------ a model's sites

local Sites = {}
Sites.__index = Sites

-- What ranks combine for each role of a layer: numbers that they add up, and numbers of which they
-- take the largest. A minimum is passed as its inverse, because ranks combine no minima. `seen`:
-- the amax since the last read (eng_fp8_amax); the other fields: of eng_fp8_meter.
local Sums = ffi.typeof [[
  struct { double count, zeros, underflow, overflow, nonfinite, signal, error; } [?] ]]
local Maxima = ffi.typeof [[
  struct { double seen, amax, inverse_least, scale_max, inverse_scale_min; } [?] ]]
local SUMS, MAXIMA = ffi.sizeof(Sums, 1) / 8, ffi.sizeof(Maxima, 1) / 8       -- numbers of a role

local role_number = {}
for i, role in ipairs(roles) do role_number[role] = i end

local function whole(site, r) return site.on and one_scale(site.recipe, r) end

local function load_policies(names, where)
  local list = {}
  if type(names) ~= "table" or names.source or names.decide then names = { names } end
  for i, name in ipairs(names) do
    local good, result = pcall(policy_files.load, name, nil, "fp8")
    if not good then raise("%s: policy: %s", where, (result:gsub("^policy: ", ""))) end
    list[i] = result
  end
  return list
end

-- Refuses a user's pattern that matches no linear layer, because a typo would otherwise go
-- unnoticed. The patterns for heads in the shipped recipes may match nothing, because a tied head
-- is not a module. Also refuses high_first and high_last if the model has no blocks. linears: the
-- paths of the linear layers. blocks: the number of blocks.
local function refuse_unmet(full, linears, blocks)
  local own, where = full.own_fp8 or {}, ("precision '%s': fp8"):format(full.name)
  local function met(pattern, of)
    for _, usual in ipairs(full.usual_high) do
      if pattern == usual then return end
    end
    for _, path in ipairs(linears) do
      if path:find(pattern) then return end
    end
    raise("%s: %s: the pattern '%s' matches no linear layer of this model; linear layers: %s",
      where, of, pattern, nearest.few(linears))
  end
  for _, pattern in ipairs(own.high or {}) do met(pattern, "high") end
  for i, over in ipairs(own.layers or {}) do met(over.match, ("layers[%d]"):format(i)) end
  for _, name in ipairs { "high_first", "high_last" } do
    raise_if(blocks == 0 and (own[name] or 0) > 0, "%s: %s counts modules named blocks.1, " ..
      "blocks.2 and so on, and this model has none; hint: high = { pattern }", where, name)
  end
end

--- Gives a site to every linear layer that the recipe puts in FP8, and removes the sites of an
--- earlier recipe. list: the optimizer's parameters. Returns nil for a recipe without FP8.
function M.attach(model, full, list)
  local fp8 = full.fp8
  local self = setmetatable({ list = {}, recipe = full, step = 0, policies = {}, by_path = {},
    amax = ffi.new("double[3]"), meter = ffi.new("eng_fp8_meter[3]") }, Sites)
  local number, linears, blocks = ffi.new("int64_t[1]"), {}, 0
  model:apply(function(module, path)
    blocks = math.max(blocks, tonumber(path:match("^blocks%.(%d+)%.")) or 0)
    if module._class == "linear" then linears[#linears + 1] = path end
  end)
  if fp8 then refuse_unmet(full, linears, blocks) end
  model:apply(function(module, path)
    rawset(module, "_fp8", nil)
    rawset(module, "_fp8_site", nil)
    if not fp8 or module._class ~= "linear" or rawget(module, "_high") then return end
    local layer = fp8_recipe.layer(fp8, path, blocks)
    if not layer then return end
    local name = path ~= "" and path or "linear"
    local where = ("precision '%s': %s"):format(full.name, name)
    local rungs = fp8_recipe.rungs(fp8, layer, precision.fp8_tables(), where)
    refuse_formula(layer, rungs[1], where)
    check(C.eng_fp8_site_new(number, name))
    local id = number[0]
    local holder = ffi.gc(ffi.new("int64_t[1]", id), function(x) C.eng_fp8_site_free(x[0]) end)
    check(C.eng_fp8_site_set(id, rungs[1]))
    rawset(module, "_fp8", tonumber(id))
    rawset(module, "_fp8_site", holder)
    local site = { path = name, id = id, holder = holder, module = module,
      recipe = rungs[1], rungs = rungs, rung = 1, on = true, meters = {}, asked = {} }
    for r = 0, 2 do
      site.asked[r + 1] = whole(site, r) and 0 or 0 / 0
      for _, rung in ipairs(rungs) do self.scalable = self.scalable or one_scale(rung, r) end
    end
    self.list[#self.list + 1], self.by_path[name] = site, site
  end)
  if not fp8 then return nil end
  self.high = {}                 -- the paths of the linear layers that are not in FP8
  for _, path in ipairs(linears) do
    if not self.by_path[path ~= "" and path or "linear"] then self.high[#self.high + 1] = path end
  end
  raise_if(#self.list == 0, "precision '%s': no linear layer is in FP8: the model has no linear " ..
    "layer, or high, high_first, high_last and layers exclude all of them, or nn.lora stores " ..
    "them in e4m3 or nf4", full.name)
  self.sample, self.rungs, self.paths = fp8.sample or 100, #(fp8.ladder or {}) + 2, {}
  for i, site in ipairs(self.list) do self.paths[i] = site.path end
  self.told = self:places().rungs
  self.averages = weight_averages.new(self.list, list)
  self:prepare(fp8.policy and load_policies(fp8.policy, ("precision '%s': fp8"):format(full.name))
    or {})
  return self
end

-- ------------------------------------------------------------------ the seats of policies

-- A seat holds an FP8 policy. run/swap.lua replaces the policy through the methods below. The
-- trainer has the same methods for the policy that chooses the loss scale.
local Seat = { kind = "fp8" }
Seat.__index = Seat

-- The policy in the seat of a recipe that has no FP8 policy. Sites:prepare marks it as `idle`;
-- steps do not run idle policies.
local NONE = { file = "none", source = [[return { name = "none", kind = "fp8",
  init = function() return { scale = 1 } end, decide = function() return 1 end }]] }

--- Gives a policy the names of the layers' tensors.
function Seat:prepare(policy) fp8_verdict.prepare(policy, self.sites.paths) end

--- Makes a prepared policy the current one.
function Seat:use_policy(policy, trainer)
  self.policy = policy
  self.sites:use()
  self.sites:apply(trainer.policy:scale() / trainer.accumulate)
end

--- Runs a policy on a step's record and on the statistics that the last measure() read.
function Seat:ask(policy, record)
  local own = self.sites.record
  ffi.copy(own, record, ffi.sizeof "eng_record")
  own.scale = 1
  return policy:decide(own, self.sites.stats)
end

--- Returns why a policy cannot be used, or nil.
function Seat:refuses(policy, trainer)
  local _, problem = fp8_verdict.places({ policy }, self.sites.names, self.sites.rungs)
  return not policy.idle and trainer:refuses_fp8()
    or problem and ("policy %s: %s"):format(policy.name, problem) or nil
end

--- Makes `policies` the current FP8 policies.
function Sites:prepare(policies)
  self.seats, self.names = {}, nil
  if #policies == 0 then
    policies = { policy_files.load(NONE, nil, "fp8") }
    policies[1].idle = true
  end
  for i, policy in ipairs(policies) do
    raise_if(not policy.handle, "an FP8 policy must be a policy file, but %s is a class; see " ..
      "policies/README.md", tostring(policy.name))
    self.names = fp8_verdict.prepare(policy, self.paths)
    self.seats[i] = setmetatable({ sites = self, policy = policy }, Seat)
  end
  self.stats, self.record = ffi.new("eng_tensor_stats[?]", #self.names), ffi.new("eng_record")
  self.sums, self.maxima = Sums(#self.names), Maxima(#self.names)
  self:use()
end

--- Collects the policies that steps run: those of the seats, except idle ones. watched: true if
--- shadows also read the layers at every step.
function Sites:use(watched)
  self.policies, self.watched = {}, watched or self.watched
  for _, seat in ipairs(self.seats) do
    if not seat.policy.idle then self.policies[#self.policies + 1] = seat.policy end
  end
  if #self.policies > 0 or self.watched then self:forget() end
end

--- Discards the amaxes of earlier steps, so that the next read covers only later steps.
function Sites:forget()
  for _, site in ipairs(self.list) do check(C.eng_fp8_amax(self.amax, site.id)) end
end

--- Called before a step's forward passes: decides whether this step is measured, and moves the
--- averages of the weights by one step.
function Sites:begin(step)
  C.eng_fp8_step(arguments.want_whole(step, "fp8:begin", "step"))
  self.averages:move()
  self.looking = self.sample > 0 and step % self.sample == 0
  if self.looking and #self.policies == 0 and not self.watched then self:forget() end
  C.eng_fp8_measure(self.looking)
end

local function inverse(x) return x > 0 and 1 / x or 0 end

local function decibel(signal, noise)
  if signal == 0 then return 0 / 0 end
  return noise == 0 and math.huge or 10 * math.log(signal / noise) / math.log(10)
end

-- Reads what the core gathered for a site since the last read. first: the index of the site's role
-- x in self.sums and self.maxima; w and dy follow it.
local function read(self, site, first)
  check(C.eng_fp8_amax(self.amax, site.id))
  if self.looking then check(C.eng_fp8_meters(self.meter, site.id)) end
  for r = 0, 2 do
    local m, sums, maxima = self.meter[r], self.sums[first + r], self.maxima[first + r]
    maxima.seen = self.amax[r]
    if self.looking then
      sums.count, sums.zeros, sums.underflow, sums.overflow = m.count, m.zeros, m.underflow,
        m.overflow
      sums.nonfinite, sums.signal, sums.error = m.nonfinite, m.signal, m.error
      maxima.amax, maxima.scale_max = m.amax, m.scale_max
      maxima.inverse_least, maxima.inverse_scale_min = inverse(m.least), inverse(m.scale_min)
    end
  end
end

-- Fills the site's meters, and the statistics that policies read. gradient: the factor by which dy
-- is scaled. first: as in read().
local function tell(self, site, gradient, first)
  for r = 0, 2 do
    local s, unit, name = self.stats[first + r], r == 2 and gradient or 1, roles[r + 1]
    local sums, maxima = self.sums[first + r], self.maxima[first + r]
    ffi.fill(s, ffi.sizeof("eng_tensor_stats"))
    local amax = maxima.seen
    s.relative_scale, s.amax = 1, amax >= 0 and amax / unit or 0
    if amax ~= amax then s.nan = 1 elseif amax == math.huge then s.inf, s.amax = 1, 0 end
    local count = sums.count
    if self.looking and count > 0 then
      s.measured, s.count, s.zeros, s.underflow, s.clipped = count, count, sums.zeros,
        sums.underflow, sums.overflow
      s.sum_squares, s.snr = sums.signal / (unit * unit), decibel(sums.signal, sums.error)
      local least = inverse(maxima.inverse_least)
      site.meters[name] = { step = self.step, snr = s.snr, underflow = sums.underflow / count,
        overflow = sums.overflow / count, zeros = sums.zeros / count, amax = maxima.amax / unit,
        least = least / unit,
        range = least > 0 and math.log(maxima.amax / least) / math.log(2) or 0,
        scale_min = inverse(maxima.inverse_scale_min) / unit,
        scale_max = maxima.scale_max / unit, count = count, nonfinite = sums.nonfinite,
        peak = amax < 0 and 0 or amax / unit, power = s.sum_squares,
        asked = site.asked[r + 1] }
    end
  end
end

--- Reads the meters of the layers. Called after a step's backward passes and before the step ends.
--- `gradient`: the factor on the gradients, that is, the seed of the backward pass (in a trainer,
--- loss scale / accumulate). `world`: the group of ranks whose meters are combined, or nil. Returns
--- the meters as rows if the step is measured.
function Sites:measure(step, gradient, world)
  self.step = step
  C.eng_fp8_measure(false)
  if #self.policies == 0 and not self.watched and not self.looking then return nil end
  local n = #self.names
  for i, site in ipairs(self.list) do read(self, site, 3 * (i - 1)) end
  if world then
    local f64 = M_ffi.dtype.f64
    check(C.eng_comm_all_reduce(world, self.maxima, MAXIMA * n, f64, C.ENG_MAX))
    if self.looking then
      check(C.eng_comm_all_reduce(world, self.sums, SUMS * n, f64, C.ENG_SUM))
    end
  end
  for i, site in ipairs(self.list) do tell(self, site, gradient, 3 * (i - 1)) end
  self.rows = self.looking and self:meters(nil, step) or nil
  return self.rows
end

--- Runs the policies on the step that measure() read and applies their decisions. `gradient`: the
--- factor on the gradients of the next step. `logs`: what the loss-scaling policy logged, { name =
--- number }, or nil. Returns one table with `logs` and with what the FP8 policies logged; if a name
--- is already in the table, the policy's entry is called POLICY.NAME. verdict: the step's verdict,
--- or nil; if an FP8 policy fails, or a part of its decision is ignored (fp8_verdict.places), the
--- verdict is marked as failed. swaps: the Swap of run/swap.lua, or nil; if a policy that was just
--- swapped in fails, `swaps` brings the old policy back.
function Sites:decide(record, gradient, logs, verdict, swaps)
  if #self.policies == 0 then return logs end
  local function fail(text)
    if verdict and verdict.failed == 0 then
      verdict.failed, verdict.reason = 1, ("FP8 policy %s"):format(text):sub(1, 255)
    end
  end
  self.reasons = {}
  for _, seat in ipairs(self.seats) do
    local own = seat:ask(seat.policy, record)
    if swaps and swaps:rejects(seat, record, own) then own = seat:ask(seat.policy, record) end
    local policy = seat.policy                             -- rejects() may have changed it
    local reason = policy.name .. ": " .. own:why()
    if own.failed ~= 0 then fail(reason)
    elseif own:why() ~= "" then table.insert(self.reasons, reason) end
    for name, value in pairs(policy:logs() or {}) do
      logs = logs or {}
      logs[logs[name] and policy.name .. "." .. name or name] = value
    end
  end
  local problem = self:apply(gradient)
  if problem then fail(problem) end
  for _, row in ipairs(self.rows or {}) do
    row.asked = self.by_path[row.site].asked[role_number[row.role]]
  end
  return logs
end

--- Calls measure() and decide(), for explicit loops. record: the step's eng_record. gradient: the
--- factor on the step's gradients (record.scale by default). next_gradient: the factor on the next
--- step's gradients (`gradient` by default). Returns what the policies logged, or nil.
function Sites:observe(record, gradient, next_gradient)
  gradient = gradient or record.scale
  self:measure(tonumber(record.step), gradient)
  return self:decide(record, next_gradient or gradient)
end

--- Applies the policies' last decisions. gradient: the factor on the next step's gradients. Returns
--- what is wrong with the decisions, or nil.
function Sites:apply(gradient)
  if #self.policies == 0 and not self.placed then return end
  self.placed = #self.policies > 0
  local places, problem = fp8_verdict.places(self.policies, self.names, self.rungs)
  if next(places.amaxes) and not self.scalable then self.in_vain = self.in_vain or "new" end
  for i, site in ipairs(self.list) do
    local rung = places.rungs[i]
    if rung ~= site.rung then
      local recipe = site.rungs[rung]
      check(C.eng_fp8_site_set(site.id, recipe))
      site.rung, site.on, site.recipe = rung, recipe ~= nil, recipe or site.recipe
      self.moved = true
    end
    for r = 0, 2 do
      site.asked[r + 1] = 0 / 0
      if whole(site, r) then
        -- The core gets 0, which stands for the tensor's own amax, if no policy sets an amax, or if
        -- `stored` would round to inf in f32 (from 2^128 - 2^103 on).
        local amax = places.amaxes[3 * (i - 1) + r + 1] or 0
        local stored = amax * (r == 2 and gradient or 1)
        site.asked[r + 1] = amax
        check(C.eng_fp8_delay(site.id, r, stored < 2 ^ 128 - 2 ^ 103 and stored or 0))
      end
    end
  end
  return problem
end

--- Returns the layers' settings for the next step: { rungs, amaxes }, in the form of
--- fp8_verdict.places.
function Sites:places()
  local places = { rungs = {}, amaxes = {} }
  for i, site in ipairs(self.list) do
    places.rungs[i] = site.rung
    for r = 1, 3 do places.amaxes[3 * (i - 1) + r] = site.asked[r] > 0 and site.asked[r] or nil end
  end
  return places
end

--- Returns whether a policy may choose the scale of tensor k (from 1) in the next step.
function Sites:scaled(k)
  local asked = self.list[math.floor((k - 1) / 3) + 1].asked[(k - 1) % 3 + 1]
  return asked == asked
end

--- Returns the layers whose rung has changed since the last call, { [path] = rung }, and a line
--- about them. Returns nil if none has changed. With `all`, returns every layer.
function Sites:moves(all)
  if not self.moved and not all then return nil end
  local now = self:places().rungs
  local moved = fp8_verdict.moved(self.paths, all and {} or self.told, now)
  local reasons = table.concat(self.reasons or {}, "; ")
  self.told, self.moved, self.reasons = now, false, nil
  return moved, moved and fp8_verdict.text(moved, self.rungs)
    .. (reasons ~= "" and " (" .. reasons .. ")" or "")
end

--- Returns a line, once, if policies choose scales although every tensor has a scale for each
--- block.
function Sites:unused()
  if self.in_vain ~= "new" then return nil end
  self.in_vain = "told"
  return ("the FP8 policy chooses scales, which have no effect: every tensor under precision %s " ..
    "has a separate scale for each block"):format(self.recipe.name)
end

--- Returns a line about the accumulators that microscaled layers used in the last forward pass.
--- Returns nil if the number of layers with Blackwell's accumulator has not changed since the last
--- call.
function Sites:products()
  local n = 0
  for _, site in ipairs(self.list) do
    if site.on and C.eng_fp8_accumulator(site.id) == C.ENG_ACCUMULATE_BLACKWELL then n = n + 1 end
  end
  if n == (self.blackwell or 0) then return nil end
  self.blackwell = n
  return ("%d of %d layers multiply codes and sum the products as Blackwell's tensor cores do; " ..
    "the others multiply bf16 numbers"):format(n, #self.list)
end

--- Returns the policies' state for a checkpoint. run/restore.lua restores it.
function Sites:state()
  local list = {}
  for i, seat in ipairs(self.seats) do
    local policy = seat.policy
    list[i] = { name = policy.name, file = policy.file, hash = policy:hash(),
      options = policy.options, state = policy:save() }
  end
  return { policies = list, held = self.averages.held }
end

-- ------------------------------------------------------------------ meters

--- Returns the last meters: a list of { site, role, step, snr (dB), underflow, overflow, zeros
--- (fractions), amax, least (the smallest nonzero magnitude), range (log2 of amax / least),
--- scale_min, scale_max, count (measured elements), nonfinite (elements that are inf or nan), and
--- peak, power and asked as in History:fp8 }. Magnitudes and scales are without the loss scale.
--- match: a pattern of module paths. step: only the meters of this step.
function Sites:meters(match, step)
  if match ~= nil then
    arguments.want_pattern(match, "meters", "match to be a Lua pattern of module paths")
  end
  local rows = {}
  for _, site in ipairs(self.list) do
    for _, role in ipairs(roles) do
      local m = site.meters[role]
      if m and (not match or site.path:find(match)) and (not step or m.step == step) then
        rows[#rows + 1] = arguments.merged(m, { site = site.path, role = role })
      end
    end
  end
  return rows
end

local function block_text(role)
  local a, b = role.block_rows, role.block_columns
  if a == 0 and b == 0 then return "tensor" end
  return ("%sx%s"):format(a == 0 and "all" or a, b == 0 and "all" or b)
end

local function format_name(number)
  for name, value in pairs(mx.formats) do
    if tonumber(value) == number then return name end
  end
end

function Sites:__tostring()
  local high = self.high[1] and table.concat(self.high, " ") or "none"
  local lines = { precision.describe(self.recipe),
    ("%s in FP8; linear layers in high precision: %s"):format(show.counted(#self.list,
      "linear layer"), high) }
  for _, site in ipairs(self.list) do
    local parts = {}
    for r, role in ipairs(roles) do
      local of, m = site.recipe.role[r - 1], site.meters[role]
      parts[r] = ("%s %s %s%s"):format(role, format_name(of.format), block_text(of),
        m and (" %.1f dB"):format(m.snr) or "")
    end
    if site.average then
      parts[2] = ("%s rounded toward an average of decay %g"):format(parts[2], site.average.decay)
    end
    if C.eng_fp8_accumulator(site.id) == C.ENG_ACCUMULATE_BLACKWELL then
      parts[#parts + 1] = "Blackwell's sums"
    end
    lines[#lines + 1] = ("  %-24s %s%s"):format(site.path, table.concat(parts, ", "),
      not site.on and "   now in high precision"
        or site.rung > 1 and ("   now on rung %d of the ladder"):format(site.rung - 1) or "")
  end
  return table.concat(lines, "\n")
end

return M
