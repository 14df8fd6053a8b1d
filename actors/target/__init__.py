"""The target: verifies proposals in passes that sessions share, and decodes alone when nobody drafts."""
