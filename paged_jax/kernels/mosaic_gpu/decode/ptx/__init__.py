"""The code of the decode kernel's plans that Pallas's interpreter cannot run: PTX.

The tests replace the functions of this folder by tests/interpreted_decode. The classes of `tiles/` have their own.
"""
