"""Learns the class of each sample."""

from loop import Trainer


class Classifier(Trainer):
    """Loss and accuracy."""

    def measure(self, network, batch):
        images, labels = batch
        outputs = network(images)
        return {"loss": self.loss(outputs, labels), "accuracy": (outputs.argmax(1) == labels).float().mean()}


build = Classifier
