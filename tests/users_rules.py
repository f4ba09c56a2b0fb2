"""Optimizers and schedules as users of SINGA and of distopt write them."""

from distopt import opt, tensor


class ByApply(opt.Optimizer):
    """SGD with momentum and weight decay in SINGA's way: `apply` alone, tensors, states by name."""

    def __init__(self, lr=0.05, momentum=0.5, weight_decay=0.01):
        super().__init__(lr)
        self.momentum = opt.Constant(momentum)
        self.mom_value = self.momentum(self.step_counter)
        self.decay_value = opt.Constant(weight_decay)(self.step_counter)
        self.buffers = {}

    def apply(self, param_name, param_value, param_grad):
        assert param_value.shape == param_grad.shape
        self.device_check(param_value, self.step_counter, self.lr_value, self.mom_value, self.decay_value)
        param_grad += self.decay_value * param_value
        if param_name not in self.buffers:
            self.buffers[param_name] = tensor.Tensor(param_value.shape, param_value.device, param_value.dtype)
        buffer = self.buffers[param_name]
        buffer *= self.mom_value
        buffer += param_grad
        param_value -= self.lr_value * buffer

    def step(self):
        super().step()
        self.mom_value.copy_data(self.momentum(self.step_counter))


class WithStates(ByApply):
    """The same, with states in SINGA's form."""

    def get_states(self):
        return {**super().get_states(), "buffers": self.buffers}

    def set_states(self, states):
        super().set_states(states)
        self.buffers = {name: tensor.Tensor(data=buffer) for name, buffer in states["buffers"].items()}


class ByHook(opt.Optimizer):
    """The same by distopt's hook: arrays, and a slot."""

    slots = ("buffer",)

    def _apply(self, param, grad, slots):
        buffer, number = slots["buffer"], param.dtype.type
        buffer *= number(0.5)
        buffer += grad + number(0.01) * param
        param -= number(self.values["lr"]) * buffer


def built_in(lr=0.05) -> opt.SGD:
    """The rule of distopt that gives the same bits."""
    return opt.SGD(lr=lr, momentum=0.5, weight_decay=0.01)
