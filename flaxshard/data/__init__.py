"""What `flaxshard.distribute` is made of.

`host` checks batches and joins their leaves, `sharding` puts them on a mesh,
`padding` brings them to few shapes, `prefetch` reads ahead.
"""
