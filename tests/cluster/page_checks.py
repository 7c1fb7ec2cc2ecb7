"""Checks of a page as JavaScript expressions. Each gives the list of what is wrong."""

# Text nodes whose colour has a contrast below 4.5 (large text: 3) with the colours behind them (WCAG AA).
LOW_CONTRAST = """(() => {
  const lum = (c) => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
  const back = (e) => { const layers = [];
    for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
      layers.push(c); if (c[3] === 1) break; }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]); };
  const open = document.querySelector('dialog[open]');
  const walker = document.createTreeWalker(open ?? document.body, NodeFilter.SHOW_TEXT);
  const wrong = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.textContent.trim() || !e.checkVisibility({ visibilityProperty: true }) || e.closest('.hidden, .skip, script, style, option'))
      continue;
    const style = getComputedStyle(e), behind = back(e);
    const colour = over(rgba(e.closest('svg') ? style.fill : style.color), behind);
    const [a, b] = [lum(colour), lum(behind)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if ((a + .05) / (b + .05) < (isLarge ? 3 : 4.5)) wrong.push(node.textContent.trim());
  }
  return wrong; })()"""  # noqa: E501

# Fields without a label that assistive technology would read.
UNLABELLED = """[...document.querySelectorAll('input, textarea, select, button, meter')].filter(e =>
  e.checkVisibility() && !(e.labels?.length || e.getAttribute('aria-label') || e.innerText?.trim())).map(e => e.outerHTML)"""  # noqa: E501

# Visible elements that jut out of the window, and the window itself where it scrolls sideways.
OVERFLOWING = """(() => { const width = document.documentElement.clientWidth;
  const out = [...document.querySelectorAll('body *')].filter(e => { const box = e.getBoundingClientRect();
    return box.width && (box.right > width + 1 || box.left < -1) && !e.closest('.hidden, .skip, svg, pre, [data-scrolls]')
      && e.checkVisibility(); });
  if (document.documentElement.scrollWidth > innerWidth) out.push(document.documentElement);
  return out.map(e => e.outerHTML.slice(0, 120)); })()"""  # noqa: E501
