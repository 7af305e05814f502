"""`python -m flaxshard.checkpoint`: see `inspection`."""

from flaxshard.checkpoint import inspection

if __name__ == "__main__":
  raise SystemExit(inspection.main())
