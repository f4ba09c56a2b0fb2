"""Three training steps of a network of SINGA's model/resnet.py: python resnet_steps.py resnet101

SINGA's own scripts train resnet50 only.
"""

import sys

import numpy as np
from model import resnet

from distopt import device, opt, tensor

model = getattr(resnet, sys.argv[1])(num_channels=3, num_classes=10)
dev = device.get_default_device()
rng = np.random.default_rng(0)
x = tensor.from_numpy(rng.standard_normal((4, 3, 224, 224)).astype(np.float32), dev)
y = tensor.from_numpy(np.array([3, 1, 4, 1], np.int32), dev)
model.set_optimizer(opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5))
model.compile([x], is_train=True, use_graph=True, sequential=False)
for _ in range(3):
    out, loss = model(x, y, "plain", None)
    print("training loss = ", tensor.to_numpy(loss)[0])
