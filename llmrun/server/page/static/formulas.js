// Formulas, drawn as MathML. What draws them is larger than the page, and is loaded when the first one appears.

const SELECTOR = "code.formula";
let temml = null;
let loading = null;

/** Draw the formulas in an element now, or in the whole page as soon as it can be done. */
export function drawFormulas(element) {
  const found = element.querySelectorAll(SELECTOR);
  if (!found.length) return;
  if (temml) for (const each of found) draw(each);
  else
    loading ??= import("./vendor/temml.js").then((module) => {
      temml = module.default;
      drawFormulas(document);
    });
}

/** Draw a formula; one that is unknown to TeX stays text. */
function draw(code) {
  const displayMode = code.classList.contains("display");
  let tree;
  try {
    tree = temml.__renderToMathMLTree(code.textContent, { displayMode, throwOnError: true, maxExpand: 200 });
  } catch {
    return code.classList.remove("formula");
  }
  withoutStyles(tree);
  const math = tree.toNode();
  math.setAttribute("title", code.textContent);
  code.replaceWith(math);
}

/** Remove attributes that the Content-Security-Policy refuses; they only make a few letters bold. */
function withoutStyles(node) {
  delete node.attributes?.style;
  node.children?.forEach(withoutStyles);
}
