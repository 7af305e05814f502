"""Runs `python -m flaxshard.checkpoint`; `inspection` documents it."""

from flaxshard.checkpoint import inspection

if __name__ == "__main__":
  raise SystemExit(inspection.main())
