"""The adapter pool: slots, pages, loading, eviction, execution."""
