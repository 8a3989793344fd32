"""Operations: one folder each."""
