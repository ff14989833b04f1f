"""The instruction that starts to load a place in memory, for kernels whose next reads are at random places."""

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic


def _prefetch(typing_context, array, position):
    """Numba intrinsic (signature, emitter) that starts to load ``array[position]`` of a 1-d array into the cache."""

    def emit(context, builder, signature, arguments):
        struct = context.make_array(signature.args[0])(context, builder, arguments[0])
        number, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        pointer = builder.bitcast(builder.gep(struct.data, [arguments[1]]), byte_pointer)
        signature_type = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, signature_type, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, number(0), number(3), number(1)])  # a read, for all cache levels, of data
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), emit


prefetch: Any = intrinsic(_prefetch)
