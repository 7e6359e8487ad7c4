-- nn.resnet18, nn.vit and the layers of images: sizes and names of torchvision, buffers, training.
local engine = require "engine"
local helper = require "spec.helper"
local nn = engine.nn

describe("models of images", function()
  after_each(function() engine.end_step() end)

  it("have torchvision's numbers and names of parameters", function()
    local shapes = require("engine.nn.module").build_shapes
    assert.equal(11689512, shapes(nn.resnet18):count())
    assert.equal(86567656, shapes(nn.vit):count())
    local names = {}
    for _, p in ipairs(nn.resnet18 { width = 4 }:parameters()) do names[p.name] = true end
    for _, name in ipairs { "conv1.weight", "bn1.running_var", "layer2.0.downsample.1.weight",
      "layer4.1.bn2.num_batches_tracked", "fc.bias" } do assert.is_true(names[name], name) end
  end)

  it("keep running statistics that evaluation uses and state() holds", function()
    engine.seed(3)
    local norm = nn.batch_norm(2, { momentum = 0.5 })
    local x = engine.tensor { { 1, 10 }, { 3, 30 } }
    norm(x)
    assert.same({ 1, 10 }, norm.running_mean:totable())
    assert.same({ 1.5, 100.5 }, norm.running_var:totable())   -- (1 + 2) / 2, (1 + 200) / 2
    assert.equal(1, norm.num_batches_tracked:item())
    local state = norm:state()
    assert.equal(norm.running_mean, state.running_mean)
    local other = nn.batch_norm(2):load_state(state):eval()
    local y = other(engine.tensor { { 1, 10 } }):totable()
    assert.near(0, y[1][1], 1e-6)
    assert.equal(4, norm:count())
    norm:freeze(false)
    local loss = norm(x):square():sum()
    loss:backward()
    assert.is_nil(norm.running_mean.grad)
    assert.has_error(function() norm(engine.zeros(1, 2)) end)
  end)

  it("learn, and resume bit for bit from a checkpoint", function()
    local function job(run, steps, resume)
      engine.seed(5)
      local net = nn.resnet18 { classes = 2, channels = 1, width = 4, stem = "small" }
      local x = engine.rand({ 32, 1, 8, 8 }, { keep = true })
      local y = x:view(32, -1):mean(2):gt(0.5):to("i64"):keep()
      local trainer = engine.trainer { model = net,
        loss = function(model, batch) return model:loss(batch.x, batch.y) end,
        data = engine.data.tensors { x = x, y = y, batch = 8, seed = 1 },
        optimizer = engine.optim.adamw(net, { lr = 1e-2, precision = "bf16" }), steps = steps,
        run = run, checkpoint_every = 3, resume = resume, log = "quiet" }
      trainer:run()
      local sums = {}
      for _, p in ipairs(net:parameters()) do
        sums[#sums + 1] = ("%s %.17g"):format(p.name, p.tensor:to("f64"):sum():item())
      end
      engine.end_step()
      return table.concat(sums, "\n")
    end
    local folder = helper.folder()
    local whole = job(folder .. "/whole", 6)
    job(folder .. "/parts", 3)
    assert.equal(whole, job(folder .. "/parts", 6, "auto"))
    helper.remove(folder)
  end)

  it("classify with vit", function()
    engine.seed(1)
    local vit = nn.vit { size = 8, patch = 4, width = 16, heads = 2, layers = 2, classes = 3 }
    local y = vit(engine.randn(5, 3, 8, 8))
    assert.same({ 5, 3 }, { y:size() })
    vit:loss(engine.randn(5, 3, 8, 8), engine.randint(0, 3, 5)):backward()
    for _, p in ipairs(vit:parameters()) do assert(p.tensor.grad, p.name) end
    assert.has_error(function() nn.vit { size = 9, patch = 4 } end)
  end)
end)
