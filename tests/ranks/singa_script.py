"""A script of the shape that SINGA's documentation gives; only its imports were changed."""

import multiprocessing
import sys

import numpy as np

from distopt import device, layer, model, opt, tensor
from distopt import singa_wrap as singa


class MLP(model.Model):
    def __init__(self):
        super().__init__()
        self.linear1 = layer.Linear(10)
        self.relu = layer.ReLU()
        self.linear2 = layer.Linear(3)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.relu(self.linear1(x)))

    def train_one_batch(self, x, y, dist_option, spars):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        if dist_option == "plain":
            self.optimizer(loss)
        elif dist_option == "half":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        elif dist_option == "sparseTopK":
            self.optimizer.backward_and_sparse_update(loss, topK=True, spars=spars)
        elif dist_option == "sparseThreshold":
            self.optimizer.backward_and_sparse_update(loss, topK=False, spars=spars)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def train(local_rank, world_size, nccl_id):
    sgd = opt.SGD(lr=0.1, momentum=0.9, weight_decay=1e-5, dtype=tensor.float32)
    sgd = opt.DistOpt(sgd, nccl_id=nccl_id, local_rank=local_rank, world_size=world_size)
    dev = device.create_cpu_device()
    dev.SetRandSeed(0)
    tx = tensor.Tensor((8, 6), dev, tensor.float32)
    ty = tensor.Tensor((8,), dev, tensor.int32)
    rng = np.random.RandomState(sgd.global_rank)
    labels = rng.randint(0, 3, 8).astype(np.int32)
    data = rng.randn(8, 6).astype(np.float32) + 3 * np.eye(3, 6, dtype=np.float32)[labels]
    m = MLP()
    m.set_optimizer(sgd)
    m.compile([tx], is_train=True, use_graph=False, sequential=False)
    m.train()
    tx.copy_from_numpy(data)
    ty.copy_from_numpy(labels)
    for option in ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"):
        for step in range(10):
            _, loss = m(tx, ty, option, spars=0.05 + 0.01 * step)
    reducer = tensor.Tensor((1,), dev, tensor.float32)
    reducer.set_value(sgd.global_rank + 1)
    sgd.all_reduce(reducer)
    sgd.wait()
    total = tensor.to_numpy(reducer)[0]
    sys.stdout.write(f"rank {sgd.global_rank} of {sgd.world_size} sum {total} {loss.item() < 0.5}\n")


if __name__ == "__main__":
    nccl_id = singa.NcclIdHolder()
    processes = [multiprocessing.Process(target=train, args=(i, 2, nccl_id)) for i in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
