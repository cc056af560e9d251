"""What tests share: fakes, stand-ins, twins and generated files."""
