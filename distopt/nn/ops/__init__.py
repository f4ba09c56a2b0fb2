"""Operations on tensors: a file for each subject, and in it beside each class the function that scripts call.

Imports `core` and `numerics`; never knows a layer. A new operation is a class and a function in the file of its
subject, the function's name in that file's `__all__`, and, if SINGA has a class for it, a row of the table in
`distopt.autograd`.
"""
