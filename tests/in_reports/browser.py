"""Looks at reports in a browser: `browser.py CHROMIUM FOLDER` prints findings on each page of a folder as JSON.

A page is opened as on a desktop and on a phone, in light and in the dark, and is printed. Pictures stay in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

# Width, height, and color scheme of each window.
WINDOWS = {
    "desktop": (1180, 900, "light"),
    "dark": (1180, 900, "dark"),
    "phone": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
# Colors of texts and of their opaque backgrounds, texts outside the window, and the width of the page.
MEASURE = """() => {
  const opaque = color => !/^rgba\\(.*, 0(\\.\\d+)?\\)$/.test(color) && color !== 'transparent';
  const background = node => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (opaque(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
    if (!text || node.nodeName === 'title' || node.closest('details:not([open])') && !node.closest('summary')) continue;
    const style = getComputedStyle(node), box = node.getBoundingClientRect();
    const scrolls = !!node.closest('.wide');
    texts.push({
      text: text.slice(0, 60),
      color: node.closest('svg') ? style.fill : style.color,
      background: background(node),
      size: node.closest('svg') ? 12 : parseFloat(style.fontSize),
      outside: !scrolls && (box.left < -1 || box.right > innerWidth + 1),
    });
  }
  return {width: document.documentElement.scrollWidth, window: innerWidth, texts};
}"""


def look(browser: Browser, path: Path) -> dict[str, Any]:
    """Open a page in each window; returns measures, messages and requests."""
    found: dict[str, Any] = {}
    for name, (width, height, scheme) in WINDOWS.items():
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        messages: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message, to=messages: to.append(message.text))
        page.on("pageerror", lambda error, to=messages: to.append(str(error)))
        page.on("request", lambda request, to=requests: to.append(request.url))
        page.goto(path.as_uri())
        found[name] = page.evaluate(MEASURE)
        found[name]["messages"] = messages
        found[name]["requests"] = [url for url in requests if not url.startswith("data:") and url != path.as_uri()]
        page.screenshot(path=path.with_name(f"{path.stem}-{name}.png"), full_page=True)
        if name == "dark":
            # Paper is white, also beside a dark screen.
            page.emulate_media(media="print", color_scheme="dark")
            found["paper"] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.pdf(path=path.with_suffix(".pdf"), format="A4", prefer_css_page_size=True)
        context.close()
    return found


def main() -> None:
    chromium, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(json.dumps({path.name: look(browser, path) for path in sorted(Path(folder).glob("*.html"))}))
        browser.close()


if __name__ == "__main__":
    main()
