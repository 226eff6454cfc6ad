"""What travels over HTTP, as msgspec structs: checked, encoded, and described to OpenAPI."""
