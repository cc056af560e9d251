// Colours of code: each token becomes a span. The names of its classes are Prism's, as are most grammars.

import Prism from "./vendor/prism.js";

const LONGEST = 30_000; // characters; longer code stays plain
const words = (text) => new RegExp(`\\b(?:${text.replaceAll(" ", "|")})\\b`);
const STRING = { pattern: /(["'])(?:\\[^]|(?!\1)[^\\])*\1/, greedy: true };
const SHELL = {
  comment: { pattern: /(^|\s)#.*/, lookbehind: true, greedy: true },
  string: STRING,
  variable: /\$(?:\{[^}]*\}|\w+|[#?!@*$-])/,
  keyword: words("if then else elif fi for while until do done case esac in function return export local set"),
  function: { pattern: /(^|[;|&]\s*|\$\(\s*)(?!\d)[\w./-]+/m, lookbehind: true },
  number: /\b\d+\b/,
  operator: /[|&;<>]+/,
};
const SQL = {
  comment: { pattern: /--.*|\/\*[^]*?\*\//, greedy: true },
  string: STRING,
  keyword: new RegExp(words("select from where group by order having join left right inner outer on as and or not in is null insert into values update set delete create table primary key foreign references drop alter add index view union all distinct limit offset case when then else end with exists between like count sum avg min max asc desc default begin commit").source, "i"),
  number: /\b\d+(?:\.\d+)?\b/,
  operator: /[=<>!]+/,
};
const YAML = {
  comment: { pattern: /(^|\s)#.*/, lookbehind: true, greedy: true },
  property: { pattern: /(^[ \t-]*)[\w./-]+(?=\s*:)/m, lookbehind: true },
  string: STRING,
  boolean: words("true false null yes no"),
  number: /\b\d+(?:\.\d+)?\b/,
};
const OWN = { bash: SHELL, sh: SHELL, shell: SHELL, zsh: SHELL, console: SHELL, sql: SQL, yaml: YAML, yml: YAML, toml: YAML, ini: YAML };
const ALIASES = { "c++": "cpp", golang: "go", rs: "rust", jsonc: "json", node: "javascript", tsx: "typescript", jsx: "javascript", patch: "diff" };

/** Return the grammar of a language, null for an unknown one. */
function grammarOf(name) {
  const language = ALIASES[name] ?? name;
  const own = Object.hasOwn(OWN, language) ? OWN[language] : null;
  return own ?? (Object.hasOwn(Prism.languages, language) && typeof Prism.languages[language] === "object" ? Prism.languages[language] : null);
}

/** Colour the text of an element. */
export function highlight(element, language) {
  const grammar = grammarOf(language.toLowerCase());
  const text = element.textContent;
  if (grammar && text.length <= LONGEST) element.replaceChildren(...Prism.tokenize(text, grammar).map(node));
}

function node(token) {
  if (typeof token === "string") return document.createTextNode(token);
  const span = document.createElement("span");
  span.className = `code-${token.type}`;
  span.append(...[token.content].flat().map(node));
  return span;
}
