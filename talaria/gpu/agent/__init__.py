"""The instance agent: one process per TP group, which runs ``policy.SlotScheduler`` over one SGLang server per model."""
