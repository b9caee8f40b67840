"""Files on disk and how they get there: durable writes, journals, sealed folders, tensors and states as bytes.

Rows of a ring as files, dumps of a buffer and the files of a checkpoint stand on them. No pickle anywhere.
"""
