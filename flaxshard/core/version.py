"""The version of flaxshard."""

VERSION = "0.1.0"
