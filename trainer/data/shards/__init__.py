"""Data in shards: files of many examples, in a folder, on a server or in a store."""
