"""make parity: chat templates. Renders conversations with transformers and compares the texts with
those in spec/golden/chat_templates.json, which the engine's spec expects. `--write` stores them
there."""
import json
import os
import sys

from transformers.utils.chat_template_utils import render_jinja_template

PATH = os.path.join(os.path.dirname(__file__), "..", "golden", "chat_templates.json")


def text_of(template, tokens, messages, prompt):
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=template,
                                            add_generation_prompt=prompt, **tokens)
        return rendered[0]
    except Exception as problem:                       # a template's raise_exception
        return {"error": str(problem)}


def main():
    with open(PATH, encoding="utf-8") as file:
        data = json.load(file)
    count, differing = 0, 0
    for entry in data["templates"]:
        texts = [text_of(entry["template"], data["tokens"], messages, prompt)
                 for messages in data["conversations"] for prompt in (False, True)]
        if "--write" in sys.argv:
            entry["texts"] = texts
        count += len(texts)
        differing += sum(a != b for a, b in zip(texts, entry["texts"]))
    if "--write" in sys.argv:
        with open(PATH, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False)
            file.write("\n")
    print(f"chat templates: {count} texts of {len(data['templates'])} templates, "
          f"{differing} differ from transformers")
    sys.exit(differing != 0)


main()
