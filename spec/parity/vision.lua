-- vision.lua FOLDER: the engine's side of vision.py. Reads requests from standard input, one JSON
-- value per line, and prints a line of JSON for each. "ops": runs an operation on the tensors of
-- FOLDER/in, and writes results and gradients to FOLDER/out. "train": trains resnet18 from the
-- weights in FOLDER/in, prints losses and times, and writes the running statistics of the last
-- batch norm and the logits in evaluation mode.
local engine = require "engine"
local json = require "engine.base.json"
local folder = assert(arg[1], "usage: engine spec/parity/vision.lua FOLDER")
local nn = engine.nn
local clock = require("engine.base.machine").clock

local OPS = {
  conv2d = function(t, o) return t.x:conv2d(t.w, t.b, o) end,
  conv1d = function(t, o) return t.x:conv1d(t.w, t.b, o) end,
  max_pool2d = function(t, o) return t.x:max_pool2d(o.kernel, o.options) end,
  avg_pool2d = function(t, o) return t.x:avg_pool2d(o.kernel, o.options) end,
  adaptive_avg_pool2d = function(t, o) return t.x:adaptive_avg_pool2d(o.size) end,
  batch_norm = function(t, o) return (t.x:batch_norm(t.w, t.b, { eps = o.eps })) end,
  group_norm = function(t, o) return t.x:group_norm(o.groups, t.w, t.b, o.eps) end,
}

local requests = {}

function requests.ops(r)
  local file, out = engine.load(folder .. "/in"), {}
  for i, call in ipairs(r.calls) do
    engine.begin_step()
    local leaves = {}
    for _, name in ipairs { "x", "w", "b" } do
      local value = file[i .. "." .. name]
      leaves[name] = value and value:to(call.dtype):keep():requires_grad(true)
    end
    local y = OPS[r.op](leaves, call.options);
    (y:to("f32") * file[i .. ".dy"]):sum():backward()
    out[i .. ".y"] = y:contiguous():keep()
    for name, leaf in pairs(leaves) do out[i .. ".d" .. name] = leaf.grad:contiguous():keep() end
    engine.end_step()
  end
  engine.save(folder .. "/out", out)
  return { done = true }
end

function requests.train(r)
  local file = engine.load(folder .. "/in")
  local x, y = file["data.x"], file["data.y"]
  file["data.x"], file["data.y"] = nil, nil
  local net = nn.resnet18(r.model):load_state(file)
  local losses, times = {}, {}
  local trainer = engine.trainer { model = net, log = "quiet", policy = "static", steps = r.steps,
    policy_options = { loss_scale = r.precision == "fp16" and r.scale or 1 },
    loss = function(model, batch) return model:loss(batch.x, batch.y) end,
    data = { at = 0, next = function(self)
      local first = self.at * r.batch % x:size(1)
      self.at = self.at + 1
      return { x = x:slice(1, first + 1, first + r.batch),
        y = y:slice(1, first + 1, first + r.batch), tokens = r.batch }
    end },
    optimizer = engine.optim.sgd(net, { lr = r.lr, momentum = 0.9, precision = r.precision }),
    on_step = function(_, record)
      losses[#losses + 1], times[#times + 1] = record.loss, clock()
    end }
  trainer:run()
  net:eval()
  local logits = engine.scope(function() return net(x:slice(1, 1, r.batch)):to("f32"):keep() end)
  local state = net:state()
  engine.save(folder .. "/out", { logits = logits, mean = state["layer4.1.bn2.running_mean"],
    variance = state["layer4.1.bn2.running_var"] })
  return { losses = losses, times = times }
end

for line in io.lines() do
  local r = json.decode(line)
  print(json.encode(requests[r.request](r)))
  io.flush()
end
