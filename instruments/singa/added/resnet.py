"""The module `resnet` that SINGA's resnet_cifar10.py and resnet_dist.py import, and that SINGA no longer has.

They call the network itself, with 1,000 classes by default; SINGA's model/resnet.py has it with 10, in a `Model`.
"""

from model import resnet


def resnet50(num_classes=1000):
    return resnet.resnet50(num_classes=num_classes).forward
