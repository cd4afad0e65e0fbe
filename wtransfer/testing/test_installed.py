"""Collected by ``pytest --pyargs wtransfer.testing --wtransfer-engine NAME``.

The module defines no test: the plug-in puts a class here for each backend that an option names.
"""
