"""What the plugin adds inside the processes of an SGLang server: held calls, exact segments, fast tokenising, cheap pauses."""
