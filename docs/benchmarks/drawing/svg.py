"""SVG that is readable in light and dark, and 400 pixels wide."""

WIDTH = 400
STYLE = """
    .page { fill: #ffffff; stroke: #d1d5db }
    text { fill: #1f2937; font: 11px system-ui, sans-serif }
    .head { font-weight: 600; font-size: 12px }
    .small { fill: #4b5563; font-size: 10px }
    .grid { stroke: #d1d5db; stroke-width: 1; fill: none }
    .goal { stroke: #1f2937; stroke-width: 2; fill: none }
    .a { fill: #1f5fae; stroke: #1f5fae }
    .b { fill: #b3541e; stroke: #b3541e }
    .c { fill: #2e7d32; stroke: #2e7d32 }
    .d { fill: #7b3fa0; stroke: #7b3fa0 }
    .e { fill: #9ca3af; stroke: #9ca3af }
    .bad { fill: #b91c1c; stroke: #b91c1c }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161a20; stroke: #374151 }
      text { fill: #e5e7eb }
      .small { fill: #b6bcc6 }
      .grid { stroke: #374151 }
      .goal { stroke: #e5e7eb }
      .a { fill: #7fb2f0; stroke: #7fb2f0 }
      .b { fill: #f0a06a; stroke: #f0a06a }
      .c { fill: #7ccf85; stroke: #7ccf85 }
      .d { fill: #c9a0e8; stroke: #c9a0e8 }
      .e { fill: #6b7280; stroke: #6b7280 }
      .bad { fill: #f87171; stroke: #f87171 }
    }
    .line { fill: none; stroke-width: 2 }
    .thin { fill: none; stroke-width: 1; opacity: 0.6 }
    .dash { stroke-dasharray: 5 3 }
    rect { stroke-width: 0 }
    .page { stroke-width: 1 }
  """


def escape(text):
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def at(value):
    """A coordinate, with at most one digit after the point."""
    text = f"{float(value):.1f}"
    return text[:-2] if text.endswith(".0") else text


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, title, description=""):
        self.title, self.description, self.parts, self.y = title, description, [], 8
        for line in wrapped(title, 50):
            self.y += 15
            self.text(10, self.y, line, "head")
        for line in wrapped(description, 64):
            self.y += 13
            self.text(10, self.y, line, "small")
        self.y += 8

    def text(self, x, y, text, kind="", anchor="start"):
        kind = f' class="{kind}"' if kind else ""
        anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text{kind} x="{at(x)}" y="{at(y)}"{anchor}>{escape(text)}</text>')

    def bar(self, x, y, width, height, kind):
        self.parts.append(f'<rect class="{kind}" x="{at(x)}" y="{at(y)}" width="{at(max(width, 0.5))}" '
                          f'height="{at(height)}" rx="1.5"/>')

    def path(self, points, kind):
        steps = "".join(f"{'L' if index else 'M'}{at(x)} {at(y)}" for index, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{kind}" d="{steps}"/>')

    def dot(self, x, y, kind, radius=3):
        self.parts.append(f'<circle class="{kind}" cx="{at(x)}" cy="{at(y)}" r="{at(radius)}"/>')

    def legend(self, entries):
        """Entries: (class, text)."""
        x = 10
        self.y += 4
        for kind, text in entries:
            width = 18 + 5.8 * len(text)
            if x + width > WIDTH - 6:
                x, self.y = 10, self.y + 15
            self.bar(x, self.y, 10, 10, kind)
            self.text(x + 14, self.y + 9, text)
            x += width + 8
        self.y += 20

    def heading(self, text, below=12):
        """A heading within the picture."""
        self.text(10, self.y + 8, text, "head")
        self.y += below

    def svg(self):
        height = at(self.y + 8)
        body = "\n  ".join(self.parts)
        description = f"\n  <desc>{escape(self.description)}</desc>" if self.description else ""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 3 // 2}" '
                f'height="{at((self.y + 8) * 1.5)}" role="img">\n  <title>{escape(self.title)}</title>{description}\n  '
                f'<style>{STYLE}</style>\n  '
                f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{at(self.y + 7)}" rx="6"/>\n  '
                f'{body}\n</svg>\n')


def wrapped(text, columns):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > columns:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return lines + ([line] if line else [])


def horizontal(picture, groups, top, reference=None, unit="", axis=True):
    """Bars in groups: (label, [(class, value, text, goal or None)]). `reference`: a vertical line at a value."""
    left, right = 10, WIDTH - 12
    span = right - left - 62

    def x(value):
        return left + float(value) / top * span

    start = picture.y
    for label, entries in groups:
        for line in wrapped(label, 60):
            picture.y += 12
            picture.text(left, picture.y, line)
        picture.y += 4
        for kind, value, text, goal in entries:
            picture.bar(left, picture.y, x(min(float(value), top)) - left, 9, kind)
            if goal is not None:
                picture.path([(x(goal), picture.y - 2), (x(goal), picture.y + 11)], "goal")
            picture.text(max(x(min(float(value), top)), x(goal) if goal is not None else 0) + 5, picture.y + 8.5, text)
            picture.y += 12
        picture.y += 2
    if reference is not None:
        picture.parts.insert(0, f'<path class="grid dash" d="M{at(x(reference))} {at(start)}V{at(picture.y + 3)}"/>')
        picture.y += 14
        picture.text(x(reference), picture.y, f"{reference}{unit}", "small", "middle")
        picture.y += 8
    picture.y += 4
