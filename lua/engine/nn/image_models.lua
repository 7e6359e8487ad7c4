-- Models that classify images [N x C x H x W]:
--   nn.resnet18  residual blocks of convolutions and batch norm
--   nn.vit       a transformer encoder over patches
-- The names of their weights are torchvision's, so load_state accepts torchvision's state dicts.
-- Shapes: N images, C channels or width, T tokens (the class token and the patches), K classes.
-- Called by scripts.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local image_layers = require "engine.nn.image_layers"
local layers = require "engine.nn.layers"
local module = require "engine.nn.module"
local show = require "engine.base.show"
local tensor = require "engine.tensor.tensor"
local transformer = require "engine.nn.transformer"

local raise_if, want_whole = M_ffi.raise_if, arguments.want_whole
local class, new_parameter = module.class, module.new_parameter
local M = {}

-- Fills in missing options from `defaults` and stores them as self.config. All options must be
-- whole numbers, except those in `others`.
local function configure(self, name, options, defaults, others)
  local config = arguments.merged(defaults, tensor.read_named(options, name, defaults))
  for key, value in pairs(config) do
    if not others[key] then want_whole(value, name, key, 1) end
  end
  self.config = config
  return config
end

-- model:loss(x, y [, options]): the mean cross entropy of the model's logits for images x against
-- the classes y [N]. Options are those of cross_entropy.
local function loss(self, x, y, options) return tensor.cross_entropy(self(x), y, options) end

-- A chain of modules, applied one after the other. Their names count from 0, as in torchvision.
local Chain = class("chain")
function Chain:init(list)
  self.length = #list
  for i, child in ipairs(list) do self[i - 1] = child end
end
function Chain:forward(x)
  for i = 0, self.length - 1 do x = self[i](x) end
  return x
end

-- ------------------------------------------------------------------ ResNet

-- A convolution without bias, with He's initialization for ReLU (fan-out).
local function conv(inputs, outputs, kernel, stride)
  return image_layers.conv2d(inputs, outputs, kernel, { stride = stride, bias = false,
    padding = (kernel - 1) / 2, std = math.sqrt(2 / (outputs * kernel * kernel)) })
end

-- Two convolutions and a shortcut: [N x inputs x H x W] -> [N x outputs x H/stride x W/stride].
local BasicBlock = class("basic_block")
function BasicBlock:init(inputs, outputs, stride)
  self.conv1 = conv(inputs, outputs, 3, stride)
  self.bn1 = image_layers.batch_norm(outputs)
  self.conv2 = conv(outputs, outputs, 3, 1)
  self.bn2 = image_layers.batch_norm(outputs)
  if stride == 1 and inputs == outputs then return end
  self.downsample = Chain { conv(inputs, outputs, 1, stride), image_layers.batch_norm(outputs) }
end
function BasicBlock:forward(x)
  local shortcut = rawget(self, "downsample") and self.downsample(x) or x
  x = self.bn1(self.conv1(x)):relu()
  return (self.bn2(self.conv2(x)) + shortcut):relu()
end

--- nn.resnet18 { classes = 1000, channels = 3, width = 64, stem = "imagenet" }: images [N x C x H
--- x W] -> logits [N x K]. width: channels of the first stage. stem = "small", for images of about
--- 32 x 32: a 3 x 3 convolution without the stride and the pooling of the ImageNet stem. Methods:
--- loss.
local ResNet = class("resnet18")
function ResNet:init(options)
  local c = configure(self, "nn.resnet18", options,
    { classes = 1000, channels = 3, width = 64, stem = "imagenet" }, { stem = true })
  M_ffi.expect(c.stem == "imagenet" or c.stem == "small", c.stem,
    "nn.resnet18: expected stem to be imagenet or small")
  local small, inputs = c.stem == "small", c.width
  self.conv1 = conv(c.channels, inputs, small and 3 or 7, small and 1 or 2)
  self.bn1 = image_layers.batch_norm(inputs)
  for stage = 1, 4 do
    local outputs = c.width * 2 ^ (stage - 1)
    self["layer" .. stage] = Chain { BasicBlock(inputs, outputs, stage > 1 and 2 or 1),
      BasicBlock(outputs, outputs, 1) }
    inputs = outputs
  end
  self.fc = layers.linear(inputs, c.classes)
end
function ResNet:forward(x)
  x = self.bn1(self.conv1(x)):relu()
  if self.config.stem ~= "small" then x = x:max_pool2d(3, { stride = 2, padding = 1 }) end
  x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
  return self.fc(x:adaptive_avg_pool2d(1):squeeze(-1):squeeze(-1))
end
ResNet.loss = loss
function ResNet:extra()
  return ("width %d, %d classes"):format(self.config.width, self.config.classes)
end
M.resnet18 = ResNet

-- ------------------------------------------------------------------ ViT

-- Self-attention: x [N x T x C] -> [N x T x C].
local Attention = class("self_attention")
function Attention:init(width, heads)
  local bound = math.sqrt(6 / (4 * width))
  self.heads = heads
  self:parameter("in_proj_weight", new_parameter({ 3 * width, width },
    function(x) x:uniform(-bound, bound) end), "linear")
  self:parameter("in_proj_bias", new_parameter { 3 * width }, "linear")
  self.out_proj = layers.linear(width, width, { std = 1 / math.sqrt(3 * width) })
end
function Attention:forward(x)
  local N, T, C = x:size()
  local q, k, v = x:linear(self.in_proj_weight, self.in_proj_bias):view(N, T, 3, self.heads,
    C / self.heads):split({ 1, 1, 1 }, 3)
  return self.out_proj(tensor.attention(q:squeeze(3), k:squeeze(3), v:squeeze(3)):view(N, T, C))
end

-- The feed-forward part. torchvision numbers the GELU and the dropouts too, so the linear layers
-- are 0 and 3.
local MLP = class("mlp")
function MLP:init(width, hidden, dropout)
  local std = math.sqrt(2 / (width + hidden))
  self[0] = layers.linear(width, hidden, { std = std })
  self[3] = layers.linear(hidden, width, { std = std })
  self.drop = layers.dropout(dropout)
end
function MLP:forward(x) return self.drop(self[3](self.drop(self[0](x):gelu()))) end

local EncoderLayer = class("encoder_layer")
function EncoderLayer:init(c)
  self.ln_1 = layers.layer_norm(c.width, { eps = 1e-6 })
  self.self_attention = Attention(c.width, c.heads)
  self.ln_2 = layers.layer_norm(c.width, { eps = 1e-6 })
  self.mlp = MLP(c.width, c.hidden, c.dropout)
  self.drop = layers.dropout(c.dropout)
end
function EncoderLayer:forward(x)
  x = x + self.drop(self.self_attention(self.ln_1(x)))
  return x + self.mlp(self.ln_2(x))
end

-- Adds the position embeddings to x [N x T x C] and applies the layers.
local Encoder = class("encoder")
function Encoder:init(c, tokens)
  self:parameter("pos_embedding", new_parameter({ 1, tokens, c.width },
    function(x) x:normal(0, 0.02) end), "embedding")
  self.drop = layers.dropout(c.dropout)
  self.depth, self.layers = c.layers, layers.list {}
  for i = 1, c.layers do self.layers["encoder_layer_" .. i - 1] = EncoderLayer(c) end
  self.ln = layers.layer_norm(c.width, { eps = 1e-6 })
end
function Encoder:forward(x)
  x = self.drop(x + self.pos_embedding)
  for i = 1, self.depth do x = self.layers["encoder_layer_" .. i - 1](x) end
  return self.ln(x)
end

local Heads = class("heads")
function Heads:init(width, classes) self.head = layers.linear(width, classes, { std = 0.01 }) end
function Heads:forward(x) return self.head(x) end

--- nn.vit { size = 224, patch = 16, channels = 3, width = 768, heads = 12, layers = 12, hidden = 4
--- * width, classes = 1000, dropout = 0 }: images [N x C x size x size] -> logits [N x K]. The
--- defaults are those of ViT-B/16. Methods: loss.
local ViT = class("vit")
function ViT:init(options)
  local c = configure(self, "nn.vit", options, { size = 224, patch = 16, channels = 3, width = 768,
    heads = 12, layers = 12, hidden = false, classes = 1000, dropout = 0 },
    { hidden = true, dropout = true })
  transformer.want_heads("nn.vit", c.width, c.heads, c.heads)
  raise_if(c.size % c.patch ~= 0, "nn.vit: the size %d is not divisible by patches of %d", c.size,
    c.patch)
  c.hidden = want_whole(c.hidden or 4 * c.width, "nn.vit", "hidden", 1)
  self:parameter("class_token", new_parameter { 1, 1, c.width }, "embedding")
  self.conv_proj = image_layers.conv2d(c.channels, c.width, c.patch,
    { stride = c.patch, std = math.sqrt(1 / (c.channels * c.patch * c.patch)) })
  self.encoder = Encoder(c, (c.size / c.patch) ^ 2 + 1)
  self.heads = Heads(c.width, c.classes)
end
-- Returns x, or raises an error unless x holds images of the size in the configuration c.
local function images(x, c)
  raise_if(x.ndim ~= 4 or x:size(2) ~= c.channels or x:size(3) ~= c.size or x:size(4) ~= c.size,
    "expected images [N x %d x %d x %d], got %s", c.channels, c.size, c.size,
    tensor.shape_text(x.shape))
  return x
end

function ViT:forward(x)
  local N, C = images(x, self.config):size(1), self.config.width
  local patches = self.conv_proj(x):view(N, C, -1):transpose()                -- [N x T-1 x C]
  local token = self.class_token:to(patches.dtype):expand(N, 1, C)
  return self.heads(self.encoder(tensor.concat({ token, patches }, 2)):select(2, 1))
end
ViT.loss = loss
function ViT:extra()
  local c = self.config
  return ("%s, width %d, %s, patch %d, %d classes"):format(show.counted(c.layers, "layer"),
    c.width, show.counted(c.heads, "head"), c.patch, c.classes)
end
M.vit = ViT

return M
