"""The compiled kernels. Where they cannot be built, the eager definitions do the same, slower."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "diloco.codec._kernels",
            ["diloco/codec/_kernels.c", "diloco/codec/_outer.c"],
            depends=["diloco/codec/_kernels.h", "diloco/codec/_subsets.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ]
)
