// Documents by libraries of Node, for documents.py: node documents.cjs FOLDER < [{lines, html}]; libraries in NODE_PATH.
const fs = require("fs");
const path = require("path");

const folder = process.argv[2];
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const plain = (text) => text.replace(/[„“]/g, '"').replace(/–/g, "-"); // what the fonts of PDF have

const stream = (doc, file, end) =>
  new Promise((resolve, reject) => {
    const out = fs.createWriteStream(file).on("finish", resolve).on("error", reject);
    end(doc, out);
  });

const makers = {
  "docx.docx": async ({ lines }, file) => {
    const { Document, Footer, Packer, Paragraph, TextRun, FootnoteReferenceRun, InsertedTextRun, DeletedTextRun } = require("docx");
    const change = { id: 1, author: "Ada", date: "2026-01-01T00:00:00Z" };
    const doc = new Document({
      footnotes: { 1: { children: [new Paragraph("A note of docx")] } },
      sections: [
        {
          footers: { default: new Footer({ children: [new Paragraph("Footer of docx")] }) },
          children: [
            ...lines.map((line) => new Paragraph(line)),
            new Paragraph({
              children: [
                new TextRun("End"),
                new FootnoteReferenceRun(1),
                new InsertedTextRun({ text: " inserted", ...change }),
                new DeletedTextRun({ text: " deleted", ...change, id: 2 }),
              ],
            }),
          ],
        },
      ],
    });
    fs.writeFileSync(file, await Packer.toBuffer(doc));
  },
  "html-to-docx.docx": async ({ html }, file) => fs.writeFileSync(file, Buffer.from(await require("html-to-docx")(html))),
  "html-docx-js.docx": async ({ html }, file) => {
    const blob = require("html-docx-js").asBlob(html);
    fs.writeFileSync(file, Buffer.isBuffer(blob) ? blob : Buffer.from(await blob.arrayBuffer()));
  },
  "officegen.docx": ({ lines }, file) => {
    const doc = require("officegen")("docx");
    for (const line of lines) doc.createP().addText(line);
    return stream(doc, file, (made, out) => made.generate(out));
  },
  "pdfkit.pdf": ({ lines }, file) => {
    const doc = new (require("pdfkit"))();
    for (const line of lines) doc.text(line);
    return stream(doc, file, (made, out) => (made.pipe(out), made.end()));
  },
  "pdf-lib.pdf": async ({ lines }, file) => {
    const { PDFDocument } = require("pdf-lib");
    const doc = await PDFDocument.create();
    const page = doc.addPage([600, 1200]);
    const form = doc.getForm();
    lines.slice(0, 30).forEach((line, at) => {
      page.drawText(`Line ${at}`, { x: 20, y: 1150 - 30 * at, size: 10 });
      const field = form.createTextField(`field${at}`);
      field.setText(plain(line).slice(0, 90));
      field.addToPage(page, { x: 100, y: 1145 - 30 * at, width: 450, height: 20 });
    });
    fs.writeFileSync(file, await doc.save());
  },
  "jspdf.pdf": ({ lines }, file) => {
    const { jsPDF } = require("jspdf");
    const doc = new jsPDF();
    let y = 20;
    for (const row of lines.flatMap((line) => doc.splitTextToSize(plain(line), 170))) {
      doc.text(row, 20, y);
      y += 8;
      if (y > 280) (doc.addPage(), (y = 20));
    }
    fs.writeFileSync(file, Buffer.from(doc.output("arraybuffer")));
  },
};

(async () => {
  for (const [name, make] of Object.entries(makers)) {
    const { name: maker, ext } = path.parse(name);
    try {
      for (const [number, each] of given.entries()) await make(each, path.join(folder, `${maker}-${number}${ext}`));
    } catch (error) {
      if (error.code !== "MODULE_NOT_FOUND") throw error;
      console.error(`without ${maker}`);
    }
  }
})();
